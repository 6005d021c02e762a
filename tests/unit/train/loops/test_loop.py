"""The loop: the steps of each call, the actions after it, and the end of training."""

from collections.abc import Callable

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

    def after(self, progress: CallProgress) -> Stop | None:
        if not self.due(progress):
            return None
        self.done.append(progress.step)
        return self.action(progress.step)


class Report(Action):
    """Records all calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def after(self, progress: CallProgress) -> None:
        self.calls.append((progress.first, progress.step, progress.compiled))


def run(
    steps: Steps,
    *actions: Action,
    first: int = 0,
    total: int = 12,
    single: range = range(0),
    stop_at: int | None = None,
    ends: bool = False,
) -> tuple[int, Stop]:
    """Run the loop; `stop_at`: the call from this step is requested to stop; `ends`: because of a callback."""
    end = EndTraining(total, lambda: ends)
    loop = Loop(first, [CheckFinite(GradientPolicy(_Optimizer())), end, *actions], steps_per_loop=4, single=single)
    stop = loop.run(steps, lambda _count, _until: Signals(stop=loop.step == stop_at))
    return loop.step, stop


class _Optimizer:
    apply = None


def test_the_first_call_is_one_step_and_no_call_crosses_periodic_work():
    steps, five = Steps(), Record(5)
    assert (12, Stop.END) == run(steps, five)
    assert [(0, 1), (1, 2), (3, 2), (5, 4), (9, 1), (10, 2)] == steps.calls
    assert [5, 10] == five.done


def test_after_a_resume_calls_end_at_the_same_steps():
    steps, five = Steps(), Record(5)
    run(steps, five, first=7)
    assert [(7, 1), (8, 2), (10, 2)] == steps.calls
    assert [10] == five.done


def test_nothing_periodic_is_done_after_the_last_step():
    six = Record(6)
    assert (12, Stop.END) == run(Steps(), six)
    assert [6] == six.done


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


def test_a_stop_at_the_last_step_is_its_end():
    assert (12, Stop.END) == run(Steps(), stop_at=11)


def test_calls_get_shorter_on_request_and_longer_otherwise():
    steps = Steps(brief_at=(1, 12))
    run(steps, total=20)
    assert [(0, 1), (1, 1), (2, 2), (4, 4), (8, 4), (12, 2), (14, 4), (18, 2)] == steps.calls


def test_steps_under_suspicion_are_done_one_by_one():
    steps = Steps()
    run(steps, single=range(5, 7))
    assert [(0, 1), (1, 2), (3, 2), (5, 1), (6, 1), (7, 4), (11, 1)] == steps.calls


def test_actions_get_every_call():
    report = Report()
    run(Steps(), report, total=9)
    assert [(0, 1, True), (1, 3, False), (3, 7, False)] == report.calls  # not the end, where the last action is due


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(bad):
    nine = Record(9)
    with pytest.raises(RunFailed, match=f"^loss is {bad} at step 7; lower --optimizer.learning-rate"):
        run(Steps(bad_step=7, bad=bad), nine)
    assert [] == nine.done
