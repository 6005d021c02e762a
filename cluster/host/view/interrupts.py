"""Signal handling of a command that watches a run.

SIGTERM acts like Ctrl-C. SIGHUP, sent when the terminal closes, only ends the watching: the run continues, as with
`--detach`. A signal that is already ignored, for instance because of `nohup`, stays ignored.
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
    """The command's terminal was closed."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Context manager that handles SIGTERM like Ctrl-C, and records SIGHUP for `raise_if_hung_up`."""
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
    """Raise `HungUp` if SIGHUP was received."""
    if _hung_up.is_set():
        raise HungUp


@contextlib.contextmanager
def ignored(doing: str) -> Iterator[None]:
    """Context manager that protects a short operation from interrupts, each of which prints a request to wait."""

    def answer(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"{doing}, please wait\n".encode())

    with _handlers(dict.fromkeys(_INTERRUPTING, answer)):
        yield


@contextlib.contextmanager
def _handlers(handlers: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    """Context manager that sets handlers of signals that are not ignored; without effect outside the main thread."""
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
