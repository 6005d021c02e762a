"""Bounded waits for a condition, as no test sleeps for a fixed time, and calls in several threads at once."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 300, pause_s: float = 0.01) -> T:
    """Return the condition's value once it is true; after the timeout fail with a message that names `what`."""
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


def await_shown(port: int, writer: str) -> None:
    """Wait until TensorBoard shows what a task of a run has written."""

    def shown() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=10) as answer:
            return json.load(answer)

    wait_for(lambda: writer in shown(), "TensorBoard to show the run")
