"""The loop: the steps of each call, the actions after it, and the end of training."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.system.errors import RunFailed
from train.loops.actions import CheckFinite, EndTraining
from train.loops.loop import Action, CallProgress, Loop, Periodic, Stop, every
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
    """Records the steps at which it is due, and what it returns there."""

    def __init__(self, steps: int, action: Callable[[int], Stop | None] = lambda step: None) -> None:
        super().__init__(every(steps))
        self.action, self.done = action, []
        self.calls: list[tuple[int, int, bool]] = []

    def after(self, progress: CallProgress) -> Stop | None:
        self.calls.append((progress.first, progress.step, progress.compiled))
        if not self.due(progress):
            return None
        self.done.append(progress.step)
        return self.action(progress.step)


def run(
    steps: Steps, *actions: Action, total: int = 12, stop_at: int | None = None, ends: bool = False, **more: Any
) -> tuple[int, Stop]:
    """Run the loop; `stop_at`: the call from this step is requested to stop; `ends`: because of a callback."""
    finite = CheckFinite(GradientPolicy(SimpleNamespace(apply=None)), lambda step: None)
    loop = Loop(actions=[finite, EndTraining(total, lambda: ends), *actions], steps_per_loop=4, **{"first": 0} | more)
    stop = loop.run(steps, lambda _count, _until: Signals(stop=loop.step == stop_at))
    return loop.step, stop


@pytest.mark.parametrize(
    ("options", "periods", "brief_at", "calls", "done"),
    [
        ({}, 5, (), [(0, 1), (1, 2), (3, 2), (5, 4), (9, 1), (10, 2)], [5, 10]),
        ({}, 6, (), [(0, 1), (1, 2), (3, 3), (6, 4), (10, 2)], [6]),  # none after the last step
        ({"first": 7}, 5, (), [(7, 1), (8, 2), (10, 2)], [10]),  # as without the resume
        ({"stop_at": 11}, 0, (), [(0, 1), (1, 2), (3, 4), (7, 4), (11, 1)], []),
        ({}, 0, (1, 8), [(0, 1), (1, 1), (2, 2), (4, 4), (8, 2), (10, 2)], []),  # shorter on request
        ({"single": range(5, 7)}, 0, (), [(0, 1), (1, 2), (3, 2), (5, 1), (6, 1), (7, 4), (11, 1)], []),
    ],
)
def test_calls_grow_from_one_step_and_none_crosses_periodic_work(options, periods, brief_at, calls, done):
    steps, record = Steps(brief_at), Record(periods)
    assert (12, Stop.END) == run(steps, record, **options)
    assert (calls, done) == (steps.calls, record.done)


def test_the_first_action_that_ends_the_training_is_the_last():
    steps, after = Steps(), Record(6)
    ended = run(steps, Record(3, lambda step: Stop.END if step == 6 else None), after, total=100)
    assert (6, Stop.END) == ended
    assert (3, 3) == steps.calls[-1]
    assert [] == after.done


@pytest.mark.parametrize(("ends", "expected"), [(False, Stop.REQUESTED), (True, Stop.END)])
def test_a_request_to_stop_ends_the_training_before_periodic_work(ends, expected):
    five = Record(5)
    assert (5, expected) == run(Steps(), five, stop_at=3, ends=ends)
    assert [] == five.done


def test_actions_get_every_call():
    report = Record(0)
    run(Steps(), report, total=9)
    assert [(0, 1, True), (1, 3, False), (3, 7, False)] == report.calls  # not the end, where the last action is due


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(bad):
    nine = Record(9)
    with pytest.raises(RunFailed, match=f"^loss is {bad} at step 7; lower --optimizer.learning-rate"):
        run(Steps(bad_step=7, bad=bad), nine)
    assert [] == nine.done
