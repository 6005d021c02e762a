"""Waiting for a condition, with a bound: no test sleeps for a fixed time; and the same thing several times at once."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 300, pause_s: float = 0.01) -> T:
    """Return the condition's value once it is true; fail naming `what` where it never is."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(pause_s)
    return value


def together(body: Callable[[int], None], count: int = 8) -> None:
    """Run `body` in several threads at the same moment."""
    start = threading.Barrier(count)
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda at: (start.wait(), body(at)), range(count)))
