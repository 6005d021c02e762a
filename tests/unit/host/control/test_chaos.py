"""Real faults on real agents with fake trainers: what is inflicted, and what it is said to have cost."""

from typing import Any

import pytest

from cluster.host.control import chaos
from cluster.host.control.chaos import Fault
from cluster.system.json_files import write_json
from tests.support.gang import Gang
from tests.unit.host.control.faulty import STEPS_ON, WORKS_ON, begin, recorded, slowing


def stopped(gang: Gang) -> dict[str, Any]:
    """Ask the run to stop; return its summary."""
    gang.run.request_stop("a test")
    return gang.summary()


def test_a_killed_worker_is_noticed_at_once_and_its_cost_reported_from_the_fault(start_gang):
    gang = begin(start_gang)
    program = gang.pid("worker-0")
    result = chaos.inflict(gang.run, Fault("kill", "worker-0", at_step=5))
    assert ("kill", "worker-0", 5, 3, None) == (
        *(result.kind, result.task, result.step, result.steps_lost),
        result.ended,
    )
    assert result.as_it_should
    assert result.detected_s is not None and result.resumed_s is not None
    assert 0 < result.detected_s < result.resumed_s
    gang.await_step("worker-0", 6)
    assert program != gang.pid("worker-0")
    (fault,) = gang.events("fault")
    assert ("worker-0", 0, 5, {"kind": "kill", "whole": False}) == tuple(
        getattr(fault, key) for key in ("task", "generation", "step", "detail")
    )
    assert [result.__dict__] == recorded(gang)
    (restart,) = stopped(gang)["restarts"]
    assert ("worker-0", 1, 3) == (restart["task"], restart["generation"], restart["steps_lost"])
    begun = gang.run.generations()[1].time
    assert round(begun - fault.time, 3) == restart["detected_s"] == result.detected_s
    assert restart["resumed_s"] == result.resumed_s


def test_a_worker_of_parameter_servers_that_is_killed_costs_no_steps(start_gang):
    gang = start_gang("if NAME != 'chief': serve()\n" + STEPS_ON, workers=1, ps=1)
    result = chaos.inflict(gang.run, Fault("kill", "worker-0", at_step=5))
    assert (0, None, 0) == (result.steps_lost, result.ended, gang.run.generation)
    (restart,) = stopped(gang)["restarts"]
    assert (result.detected_s, result.resumed_s) == (restart["detected_s"], restart["resumed_s"])
    assert restart["resumed_s"] > 0


def test_a_whole_task_that_is_killed_comes_back(start_gang):
    gang = begin(start_gang)
    agent = gang.pid("worker-0", "agent")
    result = chaos.inflict(gang.run, Fault("kill", "worker-0", whole=True))
    assert (3, None) == (result.steps_lost, result.ended)
    gang.await_step("worker-0", 6)
    assert agent != gang.pid("worker-0", "agent")
    assert [True] == [fault.detail["whole"] for fault in gang.events("fault")]
    (restart,) = stopped(gang)["restarts"]
    assert ("the whole task was killed", result.detected_s) == (restart["cause"], restart["detected_s"])


def test_a_task_that_is_stopped_stops_the_run_as_it_should(start_gang):
    gang = begin(start_gang)
    result = chaos.inflict(gang.run, Fault("stop", "worker-0"))
    assert ("stopped", None, 0, True) == (result.ended, result.detected_s, result.steps_lost, result.as_it_should)
    assert result.resumed_s is not None and gang.run.outcome is not None
    assert result.resumed_s == pytest.approx(gang.run.outcome.time - gang.events("fault")[0].time, abs=0.2)
    assert [] == gang.summary()["restarts"]


def test_the_biggest_file_of_the_newest_checkpoint_is_corrupted_by_one_byte(start_gang):
    gang = begin(start_gang)
    sizes = {"ckpt-9.data": 90, "ckpt-9.index": 20, "ckpt-10.data": 80, "ckpt-10.index": 30}
    for name, size in sizes.items():
        (gang.run.checkpoints / name).write_bytes(bytes(size))
    for step in (9, 10):  # 10 is the newest, although 9 comes last in the alphabet
        names = (f"ckpt-{step}.index", f"ckpt-{step}.data")
        files = {name: {"size_bytes": sizes[name], "sha256": ""} for name in names}
        write_json(gang.run.checkpoints / f"ckpt-{step}.json", {"step": step, "files": files})
    result = chaos.inflict(gang.run, Fault("corrupt", "chief"))
    left = {name: (gang.run.checkpoints / name).stat().st_size for name in sizes}
    assert sizes | {"ckpt-10.data": 79} == left
    assert ("corrupt", None) == (result.kind, result.ended)
    assert ["chief"] == [restart["task"] for restart in stopped(gang)["restarts"]]


def test_a_corrupt_fault_before_the_first_checkpoint_only_kills(start_gang):
    gang = begin(start_gang)
    assert 3 == chaos.inflict(gang.run, Fault("corrupt", "worker-0")).steps_lost


def test_a_slow_task_lets_nothing_start_again(start_gang, monkeypatch):
    monkeypatch.setattr(chaos, "SLOW_S", 1.0)
    gang = begin(start_gang, STEPS_ON)
    before = {task: gang.beat(task).step for task in ("chief", "worker-0")}
    result = chaos.inflict(gang.run, Fault("slow", "worker-0"))
    done = {task: gang.beat(task).step - step for task, step in before.items()}
    assert done["worker-0"] < done["chief"] / 2
    assert (None, 0, None) == (result.detected_s, result.steps_lost, result.ended)
    assert result.as_it_should
    assert result.resumed_s is not None and result.resumed_s >= 1.0
    assert 0 == gang.run.generation
    assert [] == slowing()
    assert [] == stopped(gang)["restarts"]


def test_a_lone_task_that_nobody_can_see_paused_goes_on_after_a_while(start_gang, monkeypatch):
    monkeypatch.setattr(chaos, "SLOW_S", 1.0)
    gang = start_gang(STEPS_ON, workers=0)
    gang.await_step("chief", 5)
    result = chaos.inflict(gang.run, Fault("pause", "chief"), timeout_s=300)
    assert (None, 0, None) == (result.detected_s, result.steps_lost, result.ended)
    assert result.resumed_s is not None and result.resumed_s >= 1.0
    assert 0 == gang.run.generation
    assert [] == stopped(gang)["restarts"]


def test_a_slow_task_that_dies_has_recovered_only_once_it_works_again(start_gang, monkeypatch):
    monkeypatch.setattr(chaos, "SLOW_S", 0.2)
    lines = """
import time
def fault():
    return [event for event in run.events() if event.event == "fault"]
if NAME == "worker-0" and not RESTARTS: train(1), until(fault), die()
if NAME == "worker-0": until(lambda: time.time() > fault()[0].time + 1.5)
if NAME != "chief": serve()
"""
    gang = start_gang(lines + STEPS_ON, workers=1, ps=1)
    result = chaos.inflict(gang.run, Fault("slow", "worker-0", at_step=5))
    assert result.detected_s is not None and result.resumed_s is not None
    assert max(result.detected_s, 1.0) < result.resumed_s
    assert "succeeded" != stopped(gang)["state"]


def test_a_task_that_has_no_memory_left_starts_again(start_gang):
    lines = """
import resource
train(5)
if NAME == "worker-0" and not GENERATION:
    until(lambda: resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY)
    eaten = []
    try:
        while len(eaten) < 64: eaten.append(bytearray(2**24))
    except MemoryError:
        os._exit(70)
"""
    gang = begin(start_gang, lines + WORKS_ON)
    result = chaos.inflict(gang.run, Fault("oom", "worker-0"), timeout_s=300)
    assert (3, None) == (result.steps_lost, result.ended)
    assert [("worker-0", "exit code 70")] == [(r["task"], r["cause"]) for r in stopped(gang)["restarts"]]


def test_a_run_that_ends_meanwhile_is_an_end_and_no_error(start_gang):
    gang = begin(start_gang, "if GENERATION: sys.exit('no more')\n" + WORKS_ON)
    result = chaos.inflict(gang.run, Fault("kill", "worker-0"))
    assert ("failed", False) == (result.ended, result.as_it_should)
    assert ["failed"] == [line["ended"] for line in recorded(gang)]
