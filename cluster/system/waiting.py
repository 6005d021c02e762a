"""Waiting for a condition, always with a timeout."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float, poll_s: float = 0.05) -> T:
    """Wait until a condition returns something true, for at most `timeout_s`; return its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() <= deadline:
        time.sleep(poll_s)
    return value
