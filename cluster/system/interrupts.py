"""Signals to a command that looks after a run: which ends it how, and when they have to wait.

SIGTERM is taken for Ctrl-C. SIGHUP, from a terminal that was closed, is only noted: the run goes on without anybody
who watches it, as one started with `--detach`. Where the caller ignores one of them, as `nohup` does, it stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM)
_hung_up = threading.Event()


class HungUp(BaseException):
    """The terminal is gone, and with it whoever watched the run."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, and note SIGHUP for `check`."""
    _hung_up.clear()
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def note(_number: int, _frame: FrameType | None) -> None:
        _hung_up.set()
        null = os.open(os.devnull, os.O_WRONLY)
        for number in terminals:  # writing to a terminal that is gone is an error
            os.dup2(null, number)
        os.close(null)

    with _handlers({signal.SIGTERM: interrupt, signal.SIGHUP: note}):
        yield


def check() -> None:
    """Leave the run alone if the terminal is gone.

    Raises:
        HungUp: it is.
    """
    if _hung_up.is_set():
        raise HungUp


@contextlib.contextmanager
def ignored(doing: str) -> Iterator[None]:
    """Do something that is bounded and must not be cut short; interrupts are answered with what is being done."""

    def answer(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{doing}, please wait\n".encode())

    with _handlers(dict.fromkeys(_INTERRUPTING, answer)):
        yield


@contextlib.contextmanager
def _handlers(wanted: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    """Set handlers of signals that are not ignored; only the main thread may."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in wanted.items():
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
