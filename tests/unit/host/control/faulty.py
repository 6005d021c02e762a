"""Gangs of fake trainers that are disturbed."""

import threading
import time
from typing import Any

from cluster.system.json_files import read_json_lines
from tests.support.gang import Gang, StartGang

WORKS_ON = "train(6 if GENERATION else 5), work()"
"""At step 5 whoever is hurt; the next generation repeats the steps from 3 on and works until it is asked to stop."""

STEPS_ON = """
import itertools
steps = itertools.count(1)
until(lambda: train(next(steps)) or run.stop_requested)
finish("stopped")
"""


def begin(start_gang: StartGang, lines: str = WORKS_ON, **topology: Any) -> Gang:
    """Start a gang and wait until all of it is at step 5."""
    gang = start_gang(lines, **{"workers": 1} | topology)
    for task in ("chief", "worker-0"):
        gang.await_step(task, 5)
    return gang


def recorded(gang: Gang) -> list[dict[str, Any]]:
    """Return the results that the run folder keeps, without their times."""
    results = list(read_json_lines(gang.run.path / "chaos.jsonl"))
    for result in results:
        assert 0 < time.time() - result.pop("time") < 60
    return results


def slowing() -> list[threading.Thread]:
    """Return the threads that slow a task down."""
    return [thread for thread in threading.enumerate() if "_slow" in thread.name]
