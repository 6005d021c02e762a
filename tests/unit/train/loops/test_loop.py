"""The loop: the steps of each call, the actions after it, and the end of training."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import RunFailed
from cluster.system.json_files import read_json, write_json
from train.loops.actions import CheckFinite, EndTraining, Save, Trace
from train.loops.loop import CallProgress, Loop, Periodic, Stop, every
from train.loops.steps import LoopResult, Request, Signals
from train.model.gradients import GradientPolicy


class Steps:
    """Does nothing, and records its calls."""

    def __init__(self, brief_at: tuple[int, ...] = (), bad_step: int | None = None, bad: float = float("nan")) -> None:
        self.calls: list[tuple[int, int]] = []
        self._brief_at, self._bad_step, self._bad = brief_at, bad_step, bad

    def __call__(self, first: int, count: int, request: Request) -> LoopResult:
        self.calls.append((first, count))
        steps_S = np.arange(first + 1, first + count + 1)
        losses_S = np.where(steps_S == self._bad_step, self._bad, 1.0).astype(np.float32)
        signals = Signals(request(count, count).stop, brief=first + count in self._brief_at)
        return LoopResult({"loss": losses_S}, signals)


class Record(Periodic):
    """Records the calls, and the steps at which it is due."""

    def __init__(self, steps: int) -> None:
        super().__init__(every(steps))
        self.calls: list[tuple[int, int, bool]] = []
        self.done: list[int] = []

    def after(self, progress: CallProgress) -> None:
        self.calls.append((progress.first, progress.step, progress.compiled))
        if self.due(progress):
            self.done.append(progress.step)


def run(steps: Steps, record: Record, stop_at: int | None = None, ends: bool = False, **more: Any) -> tuple[int, Stop]:
    """Run the loop; `stop_at`: the call from this step is requested to stop; `ends`: because of a callback."""
    finite = CheckFinite(GradientPolicy(SimpleNamespace(apply=None)), lambda step: None)
    loop = Loop(actions=[finite, EndTraining(12, lambda: ends), record], steps_per_loop=4, **{"first": 0} | more)
    stop = loop.run(steps, lambda _count, _until: Signals(stop=loop.step == stop_at))
    return loop.step, stop


@pytest.mark.parametrize(
    ("options", "periods", "brief_at", "calls", "done"),
    [
        ({}, 5, (), [(0, 1), (1, 1), (2, 2), (4, 1), (5, 4), (9, 1), (10, 2)], [5, 10]),
        ({}, 6, (), [(0, 1), (1, 1), (2, 2), (4, 2), (6, 4), (10, 2)], [6]),  # none after the last step
        ({"first": 7}, 5, (), [(7, 1), (8, 1), (9, 1), (10, 2)], [10]),  # as without the resume
        ({"stop_at": 8}, 0, (), [(0, 1), (1, 1), (2, 2), (4, 4), (8, 4)], []),
        ({}, 0, (1, 8), [(0, 1), (1, 1), (2, 2), (4, 4), (8, 2), (10, 2)], []),  # shorter on request
        ({"single": range(5, 7)}, 0, (), [(0, 1), (1, 1), (2, 2), (4, 1), (5, 1), (6, 1), (7, 4), (11, 1)], []),
    ],
)
def test_calls_grow_once_a_step_was_timed_and_none_crosses_periodic_work(options, periods, brief_at, calls, done):
    steps, record = Steps(brief_at), Record(periods)
    assert (12, Stop.END) == run(steps, record, **options)
    assert (calls, done) == (steps.calls, record.done)
    seen = [(first, first + count, at == 0) for at, (first, count) in enumerate(calls)]
    assert seen[:-1] == record.calls  # not the end, where the last action is due


@pytest.mark.parametrize(("ends", "expected"), [(False, Stop.REQUESTED), (True, Stop.END)])
def test_a_request_to_stop_ends_the_training_before_periodic_work(ends, expected):
    five = Record(5)
    assert (5, expected) == run(Steps(), five, stop_at=4, ends=ends)
    assert [] == five.done


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(bad):
    nine = Record(9)
    with pytest.raises(RunFailed, match=f"^loss is {bad} at step 7; lower --optimizer.learning-rate"):
        run(Steps(bad_step=7, bad=bad), nine)
    assert [] == nine.done


def test_a_larger_hang_timeout_makes_no_call_longer(run):
    """A task notices a request to stop only between calls."""
    write_json(run.control / "started.json", {"hang_timeout_s": 86_400})
    config = SimpleNamespace(checkpoint_every="auto")
    timer = Save(SimpleNamespace(run=run, config=config, chief=False), None, None, 0, list).timer
    timer.stepped(1, 1.0, compiled=True)
    assert [False, True] == [timer.brief(steps) for steps in (10, 11)]


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
    error = tf.errors.AlreadyExistsError(None, None, "Another profiler is running.")
    monkeypatch.setattr(tf.profiler.experimental, "start", Mock(side_effect=error))
    ask(run, steps=5)
    train(run, calls, 1, 4)
    assert [(0, 1), (1, 4)] == calls
    assert "Another profiler is running." == read_json(run.trace_answer)["error"]
    assert not run.trace_request.exists()
