"""Tasks that live but do nothing: found by their heartbeat or their step, reported, and started again."""

import dataclasses
import functools
import re
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.agent import watchdog
from cluster.agent.hub import News
from cluster.agent.run_view import RunView
from cluster.contract.recovery import ends
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S, HeartbeatWriter
from cluster.contract.run.records import Heartbeat, Place, Position, TaskState
from cluster.system.json_files import read_json, write_json


@pytest.mark.extended
def test_a_gang_without_a_new_step_shows_its_stacks_and_starts_again(start_gang):
    lines = "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)\n"
    lines += "train(5)\nif not GENERATION: NAME == 'worker-1' or exchange(), work()\ntrain(6), meet(), finish()"
    gang = start_gang(lines, workers=2, hang_timeout_s=4)
    summary = gang.summary()
    (restart,) = summary["restarts"]
    assert ("succeeded", "worker-1") == (summary["state"], restart["task"])
    assert re.search("at step 5; worker-1 .*gradient exchange of step 6", restart["cause"])
    for task in ("chief", "worker-0", "worker-1"):
        assert "most recent call first" in gang.run.log(task).read_text()


@pytest.mark.extended
def test_a_long_call_that_holds_the_interpreters_lock_ends_no_program(start_gang):
    gang = start_gang("import ctypes\ntrain(5), ctypes.PyDLL(None).sleep(15), train(9), meet(), finish()", workers=1)
    assert ("succeeded", []) == (gang.summary()["state"], gang.summary()["restarts"])


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: fake.now)
    return fake


def beats(run: RunFolder, **values: dict[str, Any]) -> None:
    """Write heartbeats: task -> what differs from a training one."""
    for task in run.load_cluster().tasks:
        beat, differing = HeartbeatWriter(run, task, run.generation), values.get(task.name.replace("-", "_"), {})
        beat.position = functools.partial(differing.get, "position")
        beat.update(**{"state": "training", "step": 5} | differing)
        beat.write()


def watch(run: RunFolder, task: str = "chief") -> watchdog.Watchdog:
    spec = run.load_cluster()
    return watchdog.Watchdog(RunView(run), spec, spec.task(task), run.generation)


Found = tuple[str, str] | None
"""The task and the kind of a finding."""


def elapse(dog: watchdog.Watchdog, clock: SimpleNamespace, seconds: float) -> Found:
    """Let time pass as an agent does, which looks again and again; return the finding at the end."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += min(watchdog.AWAY_S - 1, end - clock.now)
        if found := dog.examine():
            return found.task, found.kind
    return None


def elapse_alive(dog: watchdog.Watchdog, run: RunFolder, clock: SimpleNamespace, seconds: float, *alive: str) -> Found:
    """Let time pass in which some tasks, without any named the chief, give signs of life; return the finding."""
    end = clock.now + seconds
    while clock.now < end:
        for name in alive or ("chief",):
            write_json(run.status(name), read_json(run.status(name)) | {"updated_at": clock.now}, durable=False)
        if found := elapse(dog, clock, min(4.0, end - clock.now)):
            return found
    return None


def hang(dog: watchdog.Watchdog, run: RunFolder, clock: SimpleNamespace, seconds: float) -> Found:
    """Return the finding after a time with heartbeats but without a new step."""
    assert dog.examine() is None
    return elapse_alive(dog, run, clock, seconds, *(task.name for task in run.load_cluster().tasks))


def test_in_a_large_gang_only_the_chiefs_agent_reads_every_heartbeat_often(make_run, clock, monkeypatch):
    run, read = make_run(workers=63), Counter[str]()

    def heartbeat(self: RunFolder, task: str) -> Heartbeat:
        read[task] += 1
        return Heartbeat(task=task, state=TaskState.TRAINING, step=5, updated_at=clock.now)

    monkeypatch.setattr(RunFolder, "heartbeat", heartbeat)
    dog = watch(run, "worker-0")
    for _ in range(160):  # 80 s
        clock.now += watchdog.EXAMINE_S
        assert dog.examine() is None
    assert read["worker-0"] >= 160
    assert read["chief"] >= 160
    assert read["worker-62"] <= 11


def test_a_task_that_imports_may_be_silent_for_longer(make_run, clock, monkeypatch):
    monkeypatch.setattr(watchdog, "IMPORT_S", 2 * watchdog.SILENT_S)
    run = make_run(workers=2, ps=1)
    beats(run, worker_1={"state": "starting", "importing": True})
    dog = watch(run, "chief")
    assert dog.examine() is None
    others = ("chief", "worker-0", "ps-0")
    assert elapse_alive(dog, run, clock, watchdog.SILENT_S + 1, *others) is None
    assert ("worker-1", "silent") == elapse_alive(dog, run, clock, watchdog.IMPORT_S, *others)


def test_a_task_whose_agent_reported_its_end_is_not_silent(make_run, clock):
    """All lose contact when one is cut off: none of those that wait for the culprit to speak up is it."""
    run = make_run(workers=2)
    beats(run)
    dog = watch(run, "chief")
    assert 0.0 == dog.longest_silent()[1]
    clock.now += 4.0
    assert ("worker-0", 4.0) == dog.longest_silent()
    lost = ends.End("worker-0", ends.LOST_CONTACT, "lost contact", None, 0.0, may_follow=True)
    ends.record_end(run, 0, lost)
    assert ("worker-1", 4.0) == dog.longest_silent()
    ends.record_end(run, 0, dataclasses.replace(lost, task="worker-1"))
    assert ("", 0.0) == dog.longest_silent()


def test_a_task_is_alive_once_it_is_seen_to_write_a_heartbeat_again(make_run, clock):
    """Not by a heartbeat that this machine has only read for the first time: it may be old."""
    run = make_run(workers=2, evaluator=True)
    beats(run, worker_1={"state": "failed"})
    dog = watch(run, "chief")
    dog.suspect_others()
    clock.now += 4 * watchdog.SILENT_S
    assert not dog.all_are_alive
    beats(run, worker_1={"state": "failed"})
    clock.now += watchdog.EXAMINE_S
    assert dog.all_are_alive
    dog.suspect_others()
    assert not dog.all_are_alive


@pytest.mark.parametrize(
    ("unlinked", "silent", "alive"),
    [(None, "worker-0", False), (frozenset({"worker-0"}), "worker-0", False), (frozenset(), "", True)],
)
def test_where_the_folder_hides_a_first_heartbeat_the_hub_decides(
    make_run, clock, monkeypatch, unlinked, silent, alive
):
    monkeypatch.setattr(RunFolder, "script", {"script": "train.py"})
    monkeypatch.setattr(RunView, "_news", lambda self: News(unlinked=unlinked))
    dog = watch(make_run(workers=1), "chief")
    dog.suspect_others()
    clock.now += watchdog.SILENCE_S  # the hub may still count a task as connected that is gone
    assert not dog.all_are_alive
    clock.now += watchdog.PROOF_S
    assert (silent, alive) == (dog.longest_silent()[0], dog.all_are_alive)


def test_a_task_that_has_not_come_yet_is_not_silent(make_run, clock):
    """A program may end in the rendezvous: its own failure must not wait for tasks that are not there yet."""
    dog = watch(make_run(workers=1), "chief")
    assert ("", 0.0) == dog.longest_silent()
    clock.now += watchdog.SILENT_S + 1
    assert ("", 0.0) == dog.longest_silent()


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_a_task_that_has_ended_may_be_silent(make_run, clock, state):
    run = make_run(workers=0)
    beats(run, chief={"state": state})
    assert elapse(watch(run), clock, 1000) is None


def test_a_script_that_failed_is_silent_if_its_agent_decides_nothing(make_run, clock):
    run = make_run(workers=1)
    beats(run, worker_0={"state": "failed"})
    dog = watch(run)
    assert dog.examine() is None
    assert elapse_alive(dog, run, clock, watchdog.UNDECIDED_S - 4) is None
    assert ("worker-0", "silent") == elapse_alive(dog, run, clock, 8.0)


def test_a_program_that_still_imports_may_be_silent_for_longer(make_run, clock):
    run = make_run(workers=0)
    beats(run, chief={"state": "waiting"})
    dog = watch(run)
    assert dog.examine() is None
    assert elapse(dog, clock, watchdog.FROZEN_S + 1) is None
    beats(run, chief={"state": "waiting", "updated_at": time.time() + 9})  # of its agent, which does not mean much
    assert elapse(dog, clock, watchdog.IMPORT_S) is not None


def test_a_silent_program_that_no_signal_stops_gets_as_long_as_a_step(run, clock):
    beats(run)
    worker, chief = watch(run, "worker-0"), watch(run)
    for _ in range(int(HANG_TIMEOUT_S) - 2):
        assert (None, None) == (worker.examine(), chief.examine())
        clock.now += 1
    assert ("worker-0", "frozen") == elapse(worker, clock, 4)


def test_a_silent_evaluator_is_left_alone(make_run, clock):
    run = make_run(workers=0, evaluator=True)
    beats(run)
    dog = watch(run)
    assert dog.examine() is None
    assert elapse_alive(dog, run, clock, watchdog.SILENT_S + 1) is None


def at(place: Place, step: int, *, left: bool = False) -> dict[str, Any]:
    """Return the position of a task that has been at this place for a minute, as a part of its heartbeat."""
    return {"position": Position(place=place, step=step, left=left, seconds=60.0)}


def test_the_cause_names_the_late_task_and_what_it_lacks(make_run, clock):
    run = make_run(workers=2)
    waits = at(Place.EXCHANGE, 6)
    beats(run, chief=waits, worker_0=waits, worker_1=at(Place.EXCHANGE, 5, left=True))
    assert ("worker-1", "hang") == hang(watch(run), run, clock, 2 * HANG_TIMEOUT_S)
    cause = watch(run, "worker-1").describe_late("no sign of life", "worker-1")
    assert re.fullmatch("no sign of life; worker-1 .*gradient exchange of step 6.*", cause)
    beats(run, chief=waits, worker_0=waits, worker_1=waits)
    assert ("chief", "hang") == hang(watch(run), run, clock, 2 * HANG_TIMEOUT_S)


STARTING = {"state": "starting", "step": 0}
COMPILING = {"state": "compiling", "step": 0} | at(Place.START, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "by", "differing", "found"),
    [
        ({}, "chief", {"chief": STARTING}, "chief"),
        ({}, "chief", {"chief": COMPILING}, "chief"),
        ({}, "chief", {"chief": {"state": "evaluating"}}, "chief"),
        ({"workers": 2}, "chief", {"chief": COMPILING, "worker_0": COMPILING, "worker_1": STARTING}, "worker-1"),
        ({"evaluator": True}, "evaluator", {"evaluator": STARTING}, "evaluator"),
        ({"evaluator": True}, "evaluator", {"evaluator": {"state": "evaluating", "step": 0}}, None),  # no checkpoint
    ],
)
def test_the_first_step_and_evaluating_may_take_ten_times_as_long(make_run, clock, topology, by, differing, found):
    run = make_run(**{"workers": 0} | topology)
    beats(run, **differing)
    assert hang(watch(run, by), run, clock, 9 * HANG_TIMEOUT_S) is None
    assert (found and (found, "hang")) == hang(watch(run, by), run, clock, 11 * HANG_TIMEOUT_S)


def test_an_evaluation_that_goes_through_its_batches_takes_as_long_as_it_needs(make_run, clock):
    dog = watch(run := make_run(workers=0))
    for batch in (*range(4), 3):
        position = Position(place=Place.EVALUATION, step=5, left=False, seconds=60.0, batch=batch)
        beats(run, chief={"state": "evaluating", "position": position})
        found = hang(dog, run, clock, 6 * HANG_TIMEOUT_S)
        assert found is None or batch == 3
    assert ("chief", "hang") == found


def test_changes_of_state_before_the_first_step_win_no_time(make_run, clock):
    run = make_run(workers=0)
    dog = watch(run)
    for state in ("starting", "compiling"):
        beats(run, chief={"state": state, "step": 0})
        found = hang(dog, run, clock, 6 * HANG_TIMEOUT_S)
    assert found is not None


def test_time_in_which_an_agent_was_stopped_does_not_count(run, clock):
    beats(run)
    dog = watch(run)
    assert dog.examine() is None
    clock.now += 3600  # the machine slept
    assert dog.examine() is None
    assert elapse(dog, clock, watchdog.SILENT_S + 1) is not None
