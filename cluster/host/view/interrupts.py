"""Signals to a command that watches a run.

SIGTERM acts like Ctrl-C. SIGHUP, sent when the terminal closes, is only noted: the run continues unwatched, like one
started with `--detach`. A signal that the caller ignores, as `nohup` does, stays ignored.
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
    """The terminal that showed the run is gone."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, and note SIGHUP for `raise_if_hung_up`."""
    _hung_up.clear()
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def note(_number: int, _frame: FrameType | None) -> None:
        _hung_up.set()
        null = os.open(os.devnull, os.O_WRONLY)
        for number in terminals:  # writing to a closed terminal is an error
            os.dup2(null, number)
        os.close(null)

    with _handlers({signal.SIGTERM: interrupt, signal.SIGHUP: note}):
        yield


def raise_if_hung_up() -> None:
    """Raise `HungUp` if the terminal is gone."""
    if _hung_up.is_set():
        raise HungUp


@contextlib.contextmanager
def ignored(doing: str) -> Iterator[None]:
    """Protect a bounded operation from interrupts; each prints what is being done."""

    def answer(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{doing}, please wait\n".encode())

    with _handlers(dict.fromkeys(_INTERRUPTING, answer)):
        yield


@contextlib.contextmanager
def _handlers(handlers: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    """Set the handlers of signals that are not ignored. Only the main thread may, so others do nothing."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
