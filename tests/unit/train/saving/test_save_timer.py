"""When a checkpoint is due, on a clock of the tests' own: how often by cost and failures."""

import math
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json
from tests.support.beats import LEDGER
from train.saving.timer import (
    CALM_MTBF_S,
    EXPECTED_COST_S,
    LEAST_SECONDS,
    MOST_S,
    Past,
    SaveTimer,
    best_interval_s,
    parse_interval,
)


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("every", "expected"), [("auto", (0, 0)), (200, (200, 0)), ("200", (200, 0)), ("30s", (0, 30)), ("0.1s", (0, 0.1))]
)
def test_an_interval_is_steps_or_seconds_or_auto(every, expected):
    assert expected == parse_interval(every)


def waste(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the time that a second of work takes where failures come at random (Daly 2006, equation 13)."""
    return mtbf_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1) / interval_s


@pytest.mark.parametrize("cost_s", [0.01, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("mtbf_s", [20.0, 300.0, 3600.0])
def test_no_other_interval_loses_noticeably_less(cost_s, mtbf_s):
    best = best_interval_s(cost_s, 0.0, mtbf_s)
    least = min(waste(best * factor, cost_s, mtbf_s) for factor in (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2, 4))
    assert waste(best, cost_s, mtbf_s) <= least * 1.001


@pytest.mark.parametrize(
    ("cost_s", "writing_s", "mtbf_s", "expected"),
    [
        (0.1, 0.0, 3600.0, pytest.approx(math.sqrt(2 * 0.1 * 3600), rel=0.01)),  # of Young and Daly
        (0.01, 40.0, 100.0, 40),  # no faster than saves are written
        (0.0001, 0.0, 0.001, LEAST_SECONDS),
        (1.0, 0.0, 1e9, MOST_S),
        (300.0, 0.0, 1e9, 3000),  # saves are expensive
        (20.0, 0.0, 10.0, 10),  # and happen once per failure
    ],
)
def test_the_interval_has_its_bounds(cost_s, writing_s, mtbf_s, expected):
    assert expected == best_interval_s(cost_s, writing_s, mtbf_s)


def test_a_checkpoint_is_due_so_many_seconds_after_the_last_one():
    clock = Clock()
    saves = SaveTimer("30s", Past(), clock=clock)
    assert not saves.due(1)  # the first step compiles, however long that takes
    clock.now_s += 500
    saves.stepped(1, 500, compiled=True)
    assert not saves.due(25)
    clock.now_s += 10
    saves.stepped(25, 10.0, compiled=False)
    assert [False, True] == [saves.due(25), saves.due(50)]
    clock.now_s += 20
    assert saves.due(0)
    saves.saved()
    assert not saves.due(25)


@pytest.mark.parametrize(("every", "past"), [(200, Past(failed=True)), ("30s", None), ("auto", None)])
def test_by_steps_and_for_a_task_that_does_not_decide_nothing_is_ever_due(every, past):
    clock = Clock()
    saves = SaveTimer(every, past, clock=clock)
    saves.stepped(1, 1.0, compiled=True)
    clock.now_s += 1e9
    saves.stepped(1, 1e9, compiled=False)
    assert [False] * 3 == [saves.due(100), saves.brief(100), saves.waits]
    assert saves.saves["every_s"] is None


@pytest.mark.parametrize("every", [200, "30s"])
def test_a_run_that_is_stuck_saves_its_first_new_step_at_any_interval(every):
    saves = SaveTimer(every, Past(failed=True, stuck=True), clock=Clock())
    assert saves.due(1)
    assert saves.waits
    saves.saved()
    assert not saves.due(1)
    assert not SaveTimer(every, Past(failed=True), clock=Clock()).due(1)


def test_the_interval_follows_what_saves_cost():
    saves = SaveTimer("auto", Past(), clock=Clock())
    assert best_interval_s(EXPECTED_COST_S, 0, CALM_MTBF_S) == pytest.approx(saves.saves["every_s"], abs=0.001)
    saves.saved(9.0, 0.5)  # the first of a generation makes the copy
    for cost_s in (0.4, 0.1, 7.0, 0.1, 0.1):
        saves.saved(cost_s, 0.5)
    expected = round(best_interval_s(0.1, 0.5, CALM_MTBF_S), 3)
    assert {"every_s": expected, "cost_s": 0.1, "writing_s": 0.5} == saves.saves


@pytest.mark.parametrize(("before_s", "due"), [(None, False), (70.0, False), (61.0, True), (0.5, True)])
def test_no_checkpoint_is_due_while_the_last_one_is_being_written(before_s, due):
    """Unless writing will be done by then, as far as is known."""
    clock, writing = Clock(), [True]
    saves = SaveTimer("10s", Past(writing_s=before_s), writing=lambda: writing[0], clock=clock)
    saves.stepped(2, 2.0, compiled=False)
    clock.now_s += 60
    assert due == saves.due(1)
    writing[0] = False
    assert saves.due(1)


def test_after_a_failure_the_first_step_is_saved_and_then_often_but_ever_less():
    clock, past = Clock(), Past(uptimes_s=(30.0, 10.0), failed=True, cost_s=0.02)
    saves = SaveTimer("auto", past, clock=clock)
    assert saves.due(1)
    assert saves.brief(1)
    assert not saves.waits  # the generation before has finished a checkpoint
    clock.now_s += 3
    saves.stepped(1, 3.0, compiled=True)
    saves.saved(0.02, 0.1)
    assert not saves.due(0)
    intervals = []
    for _ in range(5):
        intervals.append(saves.saves["every_s"])
        clock.now_s += 60
    assert best_interval_s(0.02, 0.1, 20.0) == pytest.approx(intervals[0], abs=0.001)
    assert intervals == sorted(set(intervals))


@pytest.mark.parametrize("saves", [SaveTimer("10s", Past()), SaveTimer(200, call_s=10.0)])
def test_calls_are_brief_only_where_a_checkpoint_is_due_before_the_end_of_one_or_it_would_seem_to_hang(saves):
    assert not saves.brief(25)
    saves.stepped(1, 6.0, compiled=True)
    assert [False, True] == [saves.brief(1), saves.brief(2)]  # no step is slower than the first one
    for step_s, brief in ((0.1, False), (0.39, False), (0.41, True), (60.0, True), (0.1, False)):
        saves.stepped(25, 25 * step_s, compiled=False)
        assert brief == saves.brief(25)


def ledger(run: RunFolder, generation: int, first: int, **values: Any) -> None:
    """Leave what the chief records of a generation."""
    write_json(run.ledger(generation), LEDGER | {"generation": generation, "first": first} | values)


def fail(run: RunFolder, generation: int) -> None:
    """Begin a generation as agents do after a failure."""
    run.begin_generation(generation, task="chief", cause="killed", step=1, failed_at=1.0)


def test_the_past_is_what_failures_ended(make_run):
    run = make_run()
    ledger(run, 0, 0, saves={"every_s": 3.0, "cost_s": 0.25, "writing_s": 0.5})
    fail(run, 1)
    ledger(run, 1, 10, first_step_at=None)  # no step was done
    fail(run, 2)
    ledger(run, 2, 10, seconds=LEDGER["seconds"] | {"compute": 7.0, "save": 0.0}, saves={})
    run.begin_generation(3, resumed=True)
    ledger(run, 3, 20, seconds=LEDGER["seconds"] | {"compute": 100.0, "save": 0.0})
    fail(run, 4)  # of which the chief recorded nothing
    fail(run, 5)
    ledger(run, 5, 40)  # this one, should it have begun to record
    assert Past((5.0, 100.0), True, False, 0.25, 0.5) == Past.read(run, 5, 40)


def test_a_failure_that_needed_no_checkpoint_does_not_count(make_run):
    run = make_run()
    ledger(run, 0, 0)
    fail(run, 1)
    ledger(run, 1, 0, restored_from="memory")
    assert Past.read(run, 1, 0) == Past.read(run, 2, 0)
    assert not Past.read(run, 1, 0).failed


@pytest.mark.parametrize(
    ("first", "resumed", "failed", "stuck"),
    [(10, False, True, True), (0, False, True, True), (11, False, True, False), (10, True, False, False)],
)
def test_a_run_that_restarts_from_the_same_step_again_is_stuck(make_run, first, resumed, failed, stuck):
    """Unless it was resumed by hand."""
    run = make_run()
    ledger(run, 0, 10)
    if resumed:
        run.begin_generation(1, resumed=True)
    else:
        fail(run, 1)
    past = Past.read(run, 1, first)
    assert (failed, stuck) == (past.failed, past.stuck)
