"""A task's side of a trace: which of its calls it holds, and that nothing of them changes."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json, write_json
from train.loops.actions import Trace
from train.loops.loop import CallProgress
from train.loops.steps import LoopResult, Signals


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    """What the profiler and the inner loop were called for, in order."""
    seen: list[Any] = []
    monkeypatch.setattr(tf.profiler.experimental, "start", lambda logdir: seen.append("start"))
    monkeypatch.setattr(tf.profiler.experimental, "stop", lambda: seen.append("stop"))
    return seen


def ask(run: RunFolder, steps: int, task: str = "chief") -> None:
    write_json(run.trace_request, {"id": "one", "task": task, "steps": steps, "until": 0})


def train(run: RunFolder, calls: list[Any], *counts: int) -> None:
    """Call the inner loop for these numbers of steps, as the chief."""
    trace, step = Trace(run, "chief"), 0
    for count in counts:
        trace.before(step)
        calls.append((step, count))
        trace.after(CallProgress(step, LoopResult({"loss": np.zeros(count)}, Signals()), 1.0, compiled=not step))
        step += count


def test_whole_calls_are_traced_until_the_steps_are_there(run, calls):
    """Never the first one, which compiles."""
    ask(run, steps=5)
    train(run, calls, 1, 4, 4, 4)
    assert [(0, 1), "start", (1, 4), (5, 4), "stop", (9, 4)] == calls
    assert {"id": "one", "task": "chief", "first": 2, "last": 9} == read_json(run.trace_answer)
    assert not run.trace_request.exists()


def test_without_a_request_or_with_that_of_another_task_nothing_is_done(run, calls):
    train(run, calls, 1, 4)
    assert [(0, 1), (1, 4)] == calls
    calls.clear()
    ask(run, steps=5, task="worker-0")
    train(run, calls, 1, 4)
    assert [(0, 1), (1, 4)] == calls
    assert run.trace_request.exists()


def test_a_profiler_that_runs_already_is_reported(run, calls, monkeypatch):
    def refuse(logdir: str) -> None:
        raise tf.errors.AlreadyExistsError(None, None, "Another profiler is running.")

    monkeypatch.setattr(tf.profiler.experimental, "start", refuse)
    ask(run, steps=5)
    train(run, calls, 1, 4)
    assert [(0, 1), (1, 4)] == calls
    assert "Another profiler is running." == read_json(run.trace_answer)["error"]
    assert not run.trace_request.exists()
