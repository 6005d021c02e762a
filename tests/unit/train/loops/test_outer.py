"""The outer loop: which steps an inner call does, what happens between two, and how training ends."""

from collections.abc import Callable

import numpy as np
import pytest

from cluster.system.errors import RunFailed
from train.loops import outer
from train.loops.steps import LoopResult, Signals


class Inner:
    """Does nothing, and remembers the steps it was asked for."""

    def __init__(
        self,
        stop_after: int | None = None,
        save_at: tuple[int, ...] = (),
        brief_at: tuple[int, ...] = (),
        bad_step: int | None = None,
        bad: float = float("nan"),
    ) -> None:
        self.calls: list[tuple[int, int]] = []
        self.stops: list[bool] = []
        self._save_at, self._brief_at = save_at, brief_at
        self._stop_after, self._bad_step, self._bad = stop_after, bad_step, bad

    def __call__(self, first: int, count: int, stop: bool) -> LoopResult:
        self.calls.append((first, count))
        self.stops.append(stop)
        steps_S = np.arange(first + 1, first + count + 1)
        losses_S = np.where(steps_S == self._bad_step, self._bad, 1.0).astype(np.float32)
        another = self._stop_after is not None and first + count >= self._stop_after
        signals = Signals(stop or another, first + count in self._save_at, first + count in self._brief_at)
        return LoopResult(losses_S, np.zeros(count, np.float32), signals)


def run(
    inner: Inner,
    *every: outer.Every,
    first: int = 0,
    total: int = 12,
    steps_per_loop: int = 4,
    report: Callable[[outer.Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    save: Callable[[int], None] = lambda step: None,
) -> tuple[int, bool]:
    """Run the loop."""
    return outer.run(
        inner, first, total, steps_per_loop=steps_per_loop, every=every, report=report, stop=stop, save=save
    )


def test_the_first_call_is_one_step_and_no_other_crosses_periodic_work():
    inner, done = Inner(), []
    ended = run(inner, outer.Every(5, lambda step: done.append(("five", step))))
    assert [(0, 1), (1, 2), (3, 2), (5, 4), (9, 1), (10, 2)] == inner.calls
    assert [("five", 5), ("five", 10)] == done
    assert (12, False) == ended


def test_after_a_resume_the_same_steps_end_calls():
    inner, done = Inner(), []
    run(inner, outer.Every(5, done.append), first=7)
    assert [(7, 1), (8, 2), (10, 2)] == inner.calls
    assert [10] == done


def test_nothing_periodic_is_done_after_the_last_step():
    done: list[int] = []
    assert (12, False) == run(Inner(), outer.Every(6, done.append))
    assert [6] == done


def test_work_that_falls_together_is_done_in_its_order():
    done: list[str] = []
    run(Inner(), outer.Every(3, lambda step: done.append(f"a{step}")), outer.Every(6, lambda s: done.append(f"b{s}")))
    assert ["a3", "a6", "b6", "a9"] == done


def test_an_action_that_says_so_ends_the_training_at_that_step():
    inner, after = Inner(), []
    ended = run(inner, outer.Every(3, lambda step: step == 6), outer.Every(6, after.append), total=100)
    assert (6, False) == ended
    assert (3, 3) == inner.calls[-1]
    assert [6] == after  # what else is due at that step is done


def test_an_action_that_returns_nothing_ends_nothing():
    assert (12, False) == run(Inner(), outer.Every(3, lambda step: None))


def test_a_stop_of_this_task_reaches_the_call_and_ends_after_it():
    inner, done, stop = Inner(), [], [False]
    ended = run(
        inner,
        outer.Every(5, done.append),
        report=lambda progress: stop.append(progress.step >= 5),
        stop=lambda: stop[-1],
    )
    assert (9, True) == ended
    assert [False, False, False, True] == inner.stops
    assert [5] == done


def test_a_stop_of_another_task_ends_the_training_before_periodic_work():
    done: list[int] = []
    assert (5, True) == run(Inner(stop_after=5), outer.Every(5, done.append))
    assert [] == done


def test_a_stop_at_the_last_step_is_its_end():
    assert (12, False) == run(Inner(stop_after=12))


def test_a_task_that_wants_a_checkpoint_gets_it_at_that_step_but_not_at_the_last():
    saved: list[int] = []
    assert (12, False) == run(Inner(save_at=(1, 11, 12)), save=saved.append)
    assert [1, 11] == saved


def test_a_checkpoint_holds_what_periodic_work_has_changed_even_where_that_ends_the_training():
    done: list[str] = []

    def end(step: int) -> bool:
        done.append(f"ended {step}")
        return True

    assert (5, False) == run(
        Inner(save_at=(5,)), outer.Every(5, end), save=lambda step: done.append(f"saved {step}"), total=100
    )
    assert ["ended 5", "saved 5"] == done


def test_a_stop_leaves_the_checkpoint_to_the_end_of_training():
    saved: list[int] = []
    assert (7, True) == run(Inner(stop_after=7, save_at=(7,)), save=saved.append)
    assert [] == saved


def test_calls_get_shorter_where_a_task_wants_it_and_longer_otherwise():
    inner = Inner(brief_at=(1, 12))
    run(inner, total=20)
    assert [(0, 1), (1, 1), (2, 2), (4, 4), (8, 4), (12, 2), (14, 4), (18, 2)] == inner.calls


def test_what_was_done_is_reported():
    reports: list[outer.Progress] = []
    run(Inner(), total=9, report=reports.append)
    assert [(0, 1, True), (1, 3, False), (3, 7, False), (7, 9, False)] == [
        (one.first, one.step, one.compiled) for one in reports
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_the_step(bad):
    done: list[int] = []
    with pytest.raises(RunFailed, match=f"^loss is {bad} at step 7; lower --optimizer.learning-rate"):
        run(Inner(bad_step=7, bad=bad), outer.Every(9, done.append))
    assert [] == done
