"""Whom a run goes on without, and when it takes them in again: decisions alone, with a clock of the test's own."""

import itertools

import pytest

from cluster.agent import elastic
from cluster.agent.elastic import AGAIN_S, GONE_S, LONGEST_S, STEADY_S, Returns
from cluster.contract import spec


@pytest.mark.parametrize(
    ("missing", "min_workers", "left_out"),
    [
        ({"worker-1"}, 1, {"worker-1"}),
        ({"worker-0"}, 1, {"worker-0"}),
        ({"worker-0", "worker-2"}, 1, {"worker-0", "worker-2"}),
        ({"worker-0", "worker-1", "worker-2"}, 0, {"worker-0", "worker-1", "worker-2"}),
        ({"worker-0", "worker-1"}, 2, None),
        ({"worker-1"}, 3, None),
        ({"worker-1"}, 9, None),
        ({"chief"}, 0, None),
        ({"chief", "worker-1"}, 0, None),
    ],
)
def test_a_run_goes_on_without_workers_as_long_as_enough_are_left(missing, min_workers, left_out):
    assert left_out == elastic.leave_out(spec.build(3), missing, min_workers)


def test_a_parameter_server_is_never_left_out():
    assert elastic.leave_out(spec.build(2, 1), {"ps-0"}, 0) is None


def test_the_patience_with_a_flapping_task_grows_and_is_bounded():
    patience = [elastic.patience_s(times) for times in range(100)]
    assert [STEADY_S, STEADY_S, AGAIN_S, 2 * AGAIN_S] == patience[:4]
    assert patience == sorted(patience)
    assert LONGEST_S == patience[-1]


class World:
    """A clock, and tasks whose heartbeats change with it while they are there."""

    def __init__(self, **times_left_out: int) -> None:
        self.now = 1000.0
        self.returns = Returns({name.replace("_", "-"): n for name, n in times_left_out.items()}, lambda: self.now)

    def pass_time(self, seconds: float, *here: str, saved: int = -1) -> frozenset[str]:
        found = frozenset[str]()
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            found |= self.returns.due(dict.fromkeys(here, self.now), saved)
        return found


def test_a_task_that_returned_is_taken_in_at_the_next_checkpoint():
    world = World(worker_1=1)
    assert not world.pass_time(STEADY_S + 5, "worker-1", saved=100)
    assert {"worker-1"} == world.pass_time(1, "worker-1", saved=120)


def test_a_checkpoint_before_the_task_was_steady_is_not_enough():
    world = World(worker_1=1)
    for saved in (100, 110, 120):
        assert not world.pass_time(STEADY_S / 4, "worker-1", saved=saved)
    assert not world.pass_time(STEADY_S, "worker-1", saved=130)
    assert {"worker-1"} == world.pass_time(1, "worker-1", saved=131)


def test_a_task_that_goes_away_again_begins_anew():
    world = World(worker_1=1)
    world.pass_time(STEADY_S - 1, "worker-1", saved=1)
    world.pass_time(GONE_S + 1, saved=1)
    assert not world.pass_time(STEADY_S - 1, "worker-1", saved=2)


def test_an_old_heartbeat_is_no_return():
    world = World(worker_1=1)
    for saved in range(1, 100):
        world.now += 1
        assert not world.returns.due({"worker-1": 12.0}, saved)


def test_tasks_that_return_together_are_taken_in_together():
    world = World(worker_0=1, worker_1=1)
    world.pass_time(3, "worker-0", saved=1)
    world.pass_time(STEADY_S + 2, "worker-0", "worker-1", saved=1)
    assert {"worker-0", "worker-1"} == world.pass_time(1, "worker-0", "worker-1", saved=2)


def test_a_flapping_task_does_not_hold_up_another():
    world = World(worker_0=5, worker_1=1)
    world.pass_time(STEADY_S + 2, "worker-0", "worker-1", saved=1)
    assert {"worker-1"} == world.pass_time(1, "worker-0", "worker-1", saved=2)


def test_a_task_out_of_reach_is_due_again_only_at_a_further_checkpoint():
    world = World(worker_1=1)
    world.pass_time(STEADY_S + 1, "worker-1", saved=1)
    due = [world.pass_time(0.5, "worker-1", saved=saved) for saved in (2, 2, 2, 3)]
    assert [True, False, False, True] == [bool(each) for each in due]


@pytest.mark.parametrize("times", [2, 4, 20])
def test_no_host_however_unsteady_restarts_the_run_more_often_than_its_patience(times):
    world, saved = World(worker_1=times), itertools.count()
    began = world.now
    while not world.pass_time(1, "worker-1", saved=next(saved)):
        pass
    assert world.now - began >= elastic.patience_s(times)
