"""Waiting for a condition, with a bound: no test sleeps for a fixed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 300, pause_s: float = 0.01) -> T:
    """Return the condition's value once it is true; fail naming `what` where it never is."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(pause_s)
    return value
