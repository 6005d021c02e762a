"""The task for which the others wait is named, also where a link is dead or a task is silent."""

import functools
from dataclasses import replace
from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.results import late_tasks
from cluster.contract.run.records import Heartbeat, Place, Position, TaskState


def at(place: Place, step: int, *, left: bool = False, seconds: float = 5.0) -> Position:
    return Position(place=place, step=step, left=left, seconds=seconds)


exchange = functools.partial(at, Place.EXCHANGE)


def find(*positions: Position | None, silent: tuple[str, ...] = (), **worker_1: Any) -> tuple[list[str], str]:
    """Return the late tasks among a chief, worker-0 and worker-1, whose heartbeats say these positions."""
    training = {"state": TaskState.TRAINING, "updated_at": 1.0}
    named = zip(("chief", "worker-0", "worker-1"), positions, strict=True)
    beats = {name: Heartbeat(task=name, position=position, **training) for name, position in named}
    beats["worker-1"] = replace(beats["worker-1"], **worker_1)
    return late_tasks.find_late(spec.build(workers=2, evaluator=True), beats, 0, silent)


@pytest.mark.parametrize(
    ("positions", "silent", "late", "where"),
    [
        # One computes, saves, evaluates or has not started, while the others wait.
        ((exchange(812), exchange(812), exchange(811, left=True)), (), ["worker-1"], "gradient exchange of step 812"),
        ((at(Place.RESULTS, 8, left=True), exchange(9), exchange(9)), (), ["chief"], "gradient exchange of step 9"),
        ((exchange(8), at(Place.RESULTS, 8), exchange(8, left=True)), (), ["worker-1"], "sum of results of step 8"),
        ((at(Place.START, 0), None, at(Place.START, 0)), (), ["worker-0"], "start"),
        # One has stopped, whose heartbeat may be a second older.
        ((exchange(9), exchange(9), exchange(9)), ("worker-1",), ["worker-1"], "gradient exchange of step 9"),
        ((exchange(11), exchange(9), exchange(10)), ("worker-0",), ["worker-0"], "gradient exchange of step 10"),
        ((at(Place.RESULTS, 8, left=True),) * 3, ("chief",), ["chief"], "after the sum of results of step 8"),
        # All wait.
        ((exchange(11), exchange(10), exchange(10)), (), ["worker-0", "worker-1"], "gradient exchange of step 10"),
        ((exchange(11),) * 3, (), [], "gradient exchange of step 11"),
        ((exchange(9, seconds=1), exchange(9, seconds=1), exchange(8, left=True)), (), [], ""),
    ],
)
def test_the_task_for_which_the_others_wait_is_named(positions, silent, late, where):
    found, text = find(*positions, silent=silent)
    assert late == found
    assert all(part in text for part in (*late, where))


@pytest.mark.parametrize(
    ("unreachable", "late"),
    [
        ({"chief": "worker-1"}, ["chief", "worker-1"]),
        ({"chief": "worker-1", "worker-1": "chief"}, ["chief", "worker-1"]),
        ({"chief": "worker-1", "worker-0": "worker-1"}, ["worker-1"]),
        ({"worker-0": "a-forged-name", "worker-1": "worker-1"}, []),
    ],
)
def test_the_ends_of_a_dead_link_are_named(unreachable, late):
    at_step_11 = [
        replace(exchange(11), unreachable=(unreachable[name],) if name in unreachable else ())
        for name in ("chief", "worker-0", "worker-1")
    ]
    found, text = find(*at_step_11)
    assert late == found
    assert all(name in text for name in late)
    assert "gradient exchange of step 11" in text
    assert ["worker-0"] == find(at_step_11[0], exchange(10, left=True), at_step_11[2])[0]


@pytest.mark.parametrize("other", [{"generation": 1}, {"state": TaskState.DONE}])
def test_nobody_waits_for_a_task_of_another_generation_or_one_that_is_done(other):
    assert not find(exchange(9), exchange(9), exchange(8, left=True), **other)[0]
