"""Elastic runs: which tasks a run continues without, and when it takes them in again."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cluster.agent import agent, elastic, rendezvous
from cluster.agent.decide import BareAction, Phase
from cluster.agent.elastic import AGAIN_S, DECISION_S, GONE_S, LONGEST_S, STEADY_S, Members, Returns
from cluster.agent.run_view import RunView
from cluster.contract import spec
from cluster.contract.recovery import attempt_limits
from cluster.contract.recovery.attempt_limits import EXTERNAL, PLANNED
from cluster.contract.run import joining, membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import AfterStop
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat, restarter_of
from tests.support.waiting import wait_for


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
        ({"ps-0"}, 0, None),
    ],
)
def test_a_run_continues_without_workers_as_long_as_enough_are_left(missing, min_workers, left_out):
    assert left_out == elastic.leave_out(spec.build(3, len(missing & {"ps-0"})), missing, min_workers)


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


ONE, BOTH = ("worker-1",), ("worker-0", "worker-1")


@pytest.mark.parametrize(
    ("times_left_out", "before", "last", "due"),
    [
        ({"worker_1": 1}, [(STEADY_S + 5, ONE, 100)], (1, ONE, 120), ONE),
        # A checkpoint before the task was steady is not enough, and one that went away begins again.
        ({"worker_1": 1}, [*((STEADY_S / 4, ONE, at) for at in (1, 2, 3)), (STEADY_S, ONE, 4)], (1, ONE, 5), ONE),
        ({"worker_1": 1}, [(STEADY_S - 1, ONE, 1), (GONE_S + 1, (), 1)], (STEADY_S - 1, ONE, 2), ()),
        # Together; but one that comes and goes holds up no other.
        ({"worker_0": 1, "worker_1": 1}, [(3, BOTH[:1], 1), (STEADY_S + 2, BOTH, 1)], (1, BOTH, 2), BOTH),
        ({"worker_0": 5, "worker_1": 1}, [(STEADY_S + 2, BOTH, 1)], (1, BOTH, 2), ONE),
    ],
)
def test_tasks_that_are_back_and_steady_are_taken_in_at_the_next_checkpoint(times_left_out, before, last, due):
    world = World(**times_left_out)
    for seconds, here, saved in before:
        assert not world.pass_time(seconds, *here, saved=saved)
    seconds, here, saved = last
    assert set(due) == world.pass_time(seconds, *here, saved=saved)


def test_an_old_heartbeat_is_not_a_return():
    world = World(worker_1=1)
    for saved in range(1, 100):
        world.now += 1
        assert not world.returns.due({"worker-1": 12.0}, saved)


def test_a_task_out_of_reach_is_due_again_only_at_a_further_checkpoint():
    world = World(worker_1=1)
    world.pass_time(STEADY_S + 1, "worker-1", saved=1)
    due = [world.pass_time(0.5, "worker-1", saved=saved) for saved in (2, 2, 2, 3)]
    assert [True, False, False, True] == [bool(each) for each in due]


def record(run: RunFolder, **elasticity: object) -> None:
    write_json(run.control / "started.json", read_json(run.control / "started.json") | elasticity)


def members_of(run: RunFolder, task: str = "chief") -> Members:
    cluster = run.load_cluster()
    return Members(RunView(run), cluster, cluster.task(task))


def agent_of(run: RunFolder, task: str) -> agent.Agent:
    return agent.Agent(RunView(run), task, ["false"], rendezvous_timeout_s=1)


@pytest.fixture
def without(make_run) -> RunFolder:
    """A run of a chief and two workers that continues without worker-1, in generation 1."""
    run = make_run(workers=2)
    record(run, min_workers=1, grow=True)
    change = members_of(run).continue_without(0, {"worker-1"}, timeout_s=60)
    restarter_of(run).change_members(0, change.tasks, change.end, "left out")
    assert (1, {"worker-1"}) == (run.generation, membership.left_out(run))
    return run


def test_a_task_that_restarts_alone_only_waits_for_its_port(make_run, monkeypatch):
    run, opened = make_run(workers=1, ps=1), []
    monkeypatch.setattr(Members, "_passed_rendezvous", lambda self, generation: frozenset({"worker-0"}))
    monkeypatch.setattr(rendezvous, "hold_rendezvous", lambda *_, **__: pytest.fail("the others passed it long ago"))
    monkeypatch.setattr(rendezvous, "open_task_listener", lambda task, **_: opened.append(task.name) or socket.socket())
    attempt = SimpleNamespace(generation=0, program=None, restarts_alone=True)
    members_of(run, "worker-0").meet(attempt, run.load_cluster().task("worker-0"), timeout_s=5)
    assert ["worker-0"] == opened


@pytest.mark.parametrize(
    ("complete", "generation", "again"),
    [([], 0, True), ([], 1, True), ([], 2, False), ([0], 2, True), ([0], 3, False), ([0, 3], 5, True)],
)
def test_a_job_is_queued_again_for_a_lost_task_unless_its_cluster_is_never_complete(
    complete, generation, again, make_run, monkeypatch
):
    run = make_run(workers=2)
    for each in complete:
        run.event("chief", "cluster complete", generation=each)
    members = members_of(run, "worker-0")
    assert not members.are_queued_again(generation)  # by an engine that has no queue
    monkeypatch.setenv("LOST_THEN", AfterStop.REQUEUE)
    assert again == members.are_queued_again(generation)


def test_a_second_loss_adds_to_the_first_and_too_many_are_refused(without):
    assert not members_of(without).continue_without(1, {"worker-0"}, 60)
    record(without, min_workers=0)
    members = members_of(without)
    change = members.continue_without(1, {"worker-0"}, 60)
    assert {"worker-0", "worker-1"} == change.tasks
    restarter_of(without).change_members(1, change.tasks, change.end, "left out")
    alone = members.cluster(2)
    assert ((), "") == (alone.members, members.variables(alone)["TF_CONFIG"])


def test_a_loss_never_counts_as_a_failure_and_one_of_the_others_brings_nobody_in(without):
    assert [PLANNED] == [attempt.kind for attempt in attempt_limits.attempts_of_gang(without, 1)]
    assert 1 == attempt_limits.count_restarts(without, "chief")
    recovery = restarter_of(without)
    recovery.restart_gang(1, recovery.end(1, EXTERNAL, "killed"))
    assert (2, {"worker-1"}) == (without.generation, membership.left_out(without))


def test_the_agent_of_a_task_that_was_left_out_reports_no_death_and_sigterm_ends_it_alone(without):
    HeartbeatWriter(without, without.load_cluster().task("worker-1"), 1).update(state="waiting")
    agent_of(without, "worker-1")._report_own_death()
    assert (1, None) == (without.generation, without.outcome)
    with pytest.raises(SystemExit):
        agent_of(without, "worker-1")._act_on_terminate("")
    assert not without.stop_requested
    agent_of(without, "worker-0")._act_on_terminate("")
    assert without.stop_requested


@pytest.fixture
def returned(without) -> Iterator[RunFolder]:
    """The same, and worker-1's agent is back."""
    over = threading.Event()
    arguments = (1, over.is_set, without.load_cluster().task("worker-1"))
    thread = threading.Thread(target=members_of(without, "worker-1").await_turn, args=arguments)
    thread.start()
    wait_for(lambda: (beat := without.heartbeat("worker-1")) and beat.state == "waiting", "worker-1 to wait")
    yield without
    over.set()
    thread.join()


def look(run: RunFolder, saved: int) -> None:
    """Let the chief's agent look once, after a checkpoint."""
    (run.checkpoints / f"ckpt-{saved}.json").touch()
    members_of(run).take_in_returned(restarter_of(run), run.generation)


def test_a_task_that_returned_and_can_be_reached_is_taken_in(returned, monkeypatch):
    monkeypatch.setattr(elastic.Returns, "due", lambda self, waiting, saved: frozenset(waiting))
    wait_for(lambda: look(returned, 10) or returned.generation == 2, "worker-1 to be taken in")
    assert frozenset() == membership.left_out(returned)
    assert ["lost", "regained"] == [
        next(kind for kind in ("lost", "regained") if getattr(change, kind)) for change in membership.changes(returned)
    ]
    assert [10] == [change.step for change in membership.changes(returned)][1:]
    assert {"worker-1": 1} == membership.times_left_out(returned)
    assert ["worker-1"] == [event.task for event in returned.events() if event.event == "returned"]


def test_a_task_out_of_reach_is_not_taken_in(without, monkeypatch):
    HeartbeatWriter(without, without.load_cluster().task("worker-1"), 1).update(state="waiting")  # and nothing listens
    monkeypatch.setattr(elastic.Returns, "due", lambda self, waiting, saved: frozenset(waiting))
    look(without, 10)
    assert 1 == without.generation


def test_nobody_is_taken_in_unasked_or_after_the_last_step_or_while_the_run_stops(returned, monkeypatch):
    monkeypatch.setattr(elastic.Returns, "due", lambda self, waiting, saved: frozenset(waiting))
    record(returned, grow=False)
    look(returned, 10)
    record(returned, grow=True)
    for steps_total in (20, 100):
        beat(returned, "chief", generation=1, steps_total=steps_total)
        look(returned, 20)
        returned.request_stop("a test")
    assert 1 == returned.generation


def test_a_task_that_waits_answers_only_its_generation(returned):
    chief, worker = (returned.load_cluster().task(name) for name in ("chief", "worker-1"))
    wait_for(lambda: not rendezvous.dial(chief, worker, joining.generation_token(returned, 1), 1), "an answer")
    assert rendezvous.dial(chief, worker, joining.generation_token(returned, 0), 1)


def test_a_withdrawn_stop_does_not_bring_in_who_was_left_out(without):
    chief = agent_of(without, "chief")
    HeartbeatWriter(without, without.load_cluster().task("chief"), 1).update(state="stopped")
    without.request_stop("invoke scale", then="scale")
    without.withdraw_stop()
    attempt = chief._attempt_in(1)
    attempt.begin(Phase.DONE)
    chief._watch(attempt)
    assert (2, {"worker-1"}) == (without.generation, membership.left_out(without))


def test_only_the_chief_decides_and_the_others_wait_for_it(without):
    record(without, min_workers=0)
    assert not members_of(without, "worker-1").continue_without(1, {"worker-0"}, 60)
    waits = [
        members_of(without, name).patience_s(60, [missing])
        for name, missing in (("chief", "worker-1"), ("worker-0", "worker-1"), ("worker-0", "chief"))
    ]
    assert [60, 2 * 60 + DECISION_S, 60 + DECISION_S] == waits  # the last may be cut off from a chief that decides
    worker = agent_of(without, "worker-1")
    worker._end_generation(BareAction.QUEUE_AGAIN, worker._attempt_in(0))  # it did not see the next one at once
    assert (False, None) == (without.stop_requested, without.outcome)
