"""Waiting for a condition, always with a timeout, or for another thread."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Bell:
    """Wakes the thread that polls its descriptor."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        """Undo every `ring` so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)


def wait_until(condition: Callable[[], T], timeout_s: float, poll_s: float = 0.05) -> T:
    """Wait until a condition returns something true, for at most `timeout_s`; return its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() <= deadline:
        time.sleep(poll_s)
    return value
