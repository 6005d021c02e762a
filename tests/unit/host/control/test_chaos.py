"""Real faults on real agents with fake trainers: injected or refused, their cost, and how it is reported."""

import json
import signal
import threading
import time
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.control import chaos
from cluster.host.control.chaos import Fault, FaultCost
from cluster.host.runtime import registry
from cluster.system.errors import TimedOut, UsageError
from cluster.system.json_files import read_json_lines, write_json
from tests.support.beats import beat
from tests.support.command_line import current, refusal
from tests.support.gang import Gang, StartGang
from tests.support.waiting import wait_for

WORKS_ON = "train(6 if GENERATION else 5), work()"
"""At step 5 a task is hurt; the next generation repeats the steps from 3 and works until it is asked to stop."""

STEPS_ON = """
import itertools
steps = itertools.count(1)
until(lambda: train(next(steps)) or run.stop_requested)
finish("stopped")
"""


def begin(start_gang: StartGang, lines: str = WORKS_ON, **topology: Any) -> Gang:
    gang = start_gang(lines, **{"workers": 1} | topology)
    for task in ("chief", "worker-0"):
        gang.await_step(task, 5)
    return gang


def recorded(gang: Gang) -> list[dict[str, Any]]:
    """Return the results that the run folder keeps, without their times."""
    results = list(read_json_lines(gang.run.path / "chaos.jsonl"))
    for result in results:
        assert 0 < time.time() - result.pop("time") < 60
    return results


def slowing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_slow" in thread.name]


def stopped(gang: Gang) -> dict[str, Any]:
    gang.run.request_stop("a test")
    return gang.summary()


def test_a_killed_worker_is_noticed_at_once_and_its_cost_reported_from_the_fault(start_gang):
    gang = begin(start_gang)
    program = gang.pid("worker-0")
    result = chaos.inject(gang.run, Fault("kill", "worker-0", at_step=5))
    assert (5, 3, None, True) == (result.step, result.steps_lost, result.ended, result.is_expected)
    assert result.detected_s is not None and result.resumed_s is not None
    assert 0 < result.detected_s < result.resumed_s
    gang.await_step("worker-0", 6)
    assert program != gang.pid("worker-0")
    (fault,) = gang.events("fault")
    assert ("worker-0", 5, {"kind": "kill", "whole": False}) == (fault.task, fault.step, fault.detail)
    assert [result.__dict__] == recorded(gang)
    (restart,) = stopped(gang)["restarts"]
    assert round(gang.run.generations()[1].time - fault.time, 3) == restart["detected_s"] == result.detected_s
    assert (3, result.resumed_s) == (restart["steps_lost"], restart["resumed_s"])


EATS = """
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


@pytest.mark.extended
def test_a_task_whose_program_finds_no_memory_comes_back(start_gang):
    gang = begin(start_gang, EATS + WORKS_ON)
    result = chaos.inject(gang.run, Fault("oom", "worker-0"), timeout_s=300)
    assert (3, None) == (result.steps_lost, result.ended)
    gang.await_step("worker-0", 6)
    (restart,) = stopped(gang)["restarts"]
    assert ("worker-0", "exit code 70") == (restart["task"], restart["cause"])
    assert (result.detected_s, result.resumed_s) == (restart["detected_s"], restart["resumed_s"])


def test_a_task_that_is_stopped_stops_the_run_as_it_should(start_gang):
    gang = begin(start_gang)
    result = chaos.inject(gang.run, Fault("stop", "worker-0"))
    assert ("stopped", None, 0, True) == (result.ended, result.detected_s, result.steps_lost, result.is_expected)
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
    result = chaos.inject(gang.run, Fault("corrupt", "chief"))
    left = {name: (gang.run.checkpoints / name).stat().st_size for name in sizes}
    assert sizes | {"ckpt-10.data": 79} == left
    assert ("corrupt", None) == (result.kind, result.ended)
    assert ["chief"] == [restart["task"] for restart in stopped(gang)["restarts"]]


@pytest.mark.parametrize("fault", [Fault("slow", "worker-0"), Fault("pause", "chief")], ids=str)
def test_a_slow_task_and_a_lone_one_that_is_paused_let_nothing_start_again(start_gang, monkeypatch, fault):
    monkeypatch.setattr(chaos, "SLOW_S", 1.0)
    gang = start_gang(STEPS_ON, workers=int(fault.kind == "slow"))
    before = {task: gang.await_step(task, 5) or gang.beat(task).step for task in {"chief", fault.task}}
    result = chaos.inject(gang.run, fault, timeout_s=300)
    done = {task: gang.beat(task).step - step for task, step in before.items()}
    assert fault.kind == "pause" or done["worker-0"] < done["chief"] / 2
    assert (None, 0, None) == (result.detected_s, result.steps_lost, result.ended)
    assert result.is_expected
    assert result.resumed_s is not None and result.resumed_s >= 1.0
    assert 0 == gang.run.generation
    assert [] == slowing()
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
    result = chaos.inject(gang.run, Fault("slow", "worker-0", at_step=5))
    assert result.detected_s is not None and result.resumed_s is not None
    assert max(result.detected_s, 1.0) < result.resumed_s
    assert "succeeded" != stopped(gang)["state"]


def test_a_run_that_ends_before_it_recovers_is_an_end_and_not_an_error(start_gang):
    gang = begin(start_gang, "if GENERATION: sys.exit('no more')\n" + WORKS_ON)
    result = chaos.inject(gang.run, Fault("kill", "worker-0"))
    assert ("failed", False) == (result.ended, result.is_expected)
    assert ["failed"] == [line["ended"] for line in recorded(gang)]


def test_a_fault_whose_step_never_comes_is_not_injected(start_gang):
    gang = start_gang("train(5), meet(), finish()", workers=1)
    with pytest.raises(UsageError):
        chaos.inject(gang.run, Fault("kill", "worker-0", at_step=100))
    assert ([], []) == (gang.events("fault"), recorded(gang))
    assert ("succeeded", []) == (gang.summary()["state"], gang.summary()["restarts"])


def test_a_flip_that_the_end_of_the_run_prevented_is_not_reported_as_one(start_gang):
    gang = start_gang("train(5), until(run.flip_request('chief').exists), meet(), finish()", workers=1)
    with pytest.raises(UsageError):
        chaos.inject(gang.run, Fault("flip", "chief"))
    assert ([], False) == (recorded(gang), gang.run.flip_request("chief").exists())


def test_waiting_for_the_step_and_for_the_recovery_is_bounded(start_gang):
    gang = begin(start_gang, "if GENERATION: until(lambda: False)\n" + WORKS_ON)
    with pytest.raises(TimedOut):
        chaos.inject(gang.run, Fault("kill", "worker-0", at_step=100), timeout_s=0.2)
    assert [] == gang.events("fault")
    with pytest.raises(TimedOut):
        chaos.inject(gang.run, Fault("kill", "worker-0"), timeout_s=0.5)
    assert (1, []) == (len(gang.events("fault")), recorded(gang))
    wait_for(lambda: gang.run.generation == 1, "the gang's next generation")


def test_what_still_lasts_is_undone_when_nothing_recovers(start_gang, monkeypatch):
    monkeypatch.setattr(chaos._Watch, "has_recovered", lambda self: False)
    monkeypatch.setattr(chaos, "SLOW_S", 0.1)
    gang = begin(start_gang, STEPS_ON)
    with pytest.raises(TimedOut):
        chaos.inject(gang.run, Fault("slow", "worker-0"), timeout_s=0.3)
    assert [] == slowing()
    gang.await_step("worker-0", gang.beat("worker-0").step + 20)


def test_a_fault_must_end_the_run_only_where_it_should():
    kinds, ends = ("kill", "stop", "diskfull"), (None, "succeeded", "failed", "stopped")
    costs = [FaultCost(kind, "chief", 5, 1.0, 2.0, 0, ended) for kind in kinds for ended in ends]
    expected = {("kill", None), ("kill", "succeeded"), ("stop", "stopped"), ("diskfull", "failed")}
    assert expected == {(cost.kind, cost.ended) for cost in costs if cost.is_expected}


@pytest.fixture
def run(run) -> RunFolder:
    """A run that trains, as far as its folder says."""
    beat(run, "chief", step=5)
    return current(run)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "kill"}, "chaos kill"),
        ({"kind": "kil", "task": "worker-0"}, "'kill'"),
        ({"kind": "strom"}, "'storm'"),
        ({"kind": "kill", "task": "worker-7"}, "'worker-0'"),
        ({"kind": "pause", "task": "worker-0", "whole": True}, "--whole"),
        ({"kind": "partition", "task": "worker-0"}, "--runtime docker"),
        ({"kind": "corrupt", "task": "worker-0"}, "script"),
        ({"kind": "kill", "task": "worker-0", "at_step": "soon"}, "--at-step"),
        ({"kind": "storm", "faults": "0"}, "--faults"),
    ],
)
def test_wrong_usage_ends_with_2_and_injects_nothing(run, options, named):
    if options["kind"] == "corrupt":
        write_json(run.config, {"script": "train.py", "arguments": []})  # only the script knows its checkpoints
    code, message = refusal("chaos", **options)
    assert (2, 1, True) == (code, len(message.splitlines()), named in message)
    assert ([], False) == (run.events(), (run.path / "chaos.jsonl").exists())


@pytest.mark.parametrize(("kind", "code"), [("kill", 1), ("stop", 0)])
def test_the_exit_code_reports_whether_the_run_did_as_it_should(run, monkeypatch, capsys, kind, code):
    injected = []

    def inject(folder: RunFolder, fault: Fault, timeout_s: float) -> FaultCost:
        injected.append((folder, fault, timeout_s, signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))
        return FaultCost(fault.kind, fault.task, 52, None, 1.0, 0, "stopped")

    monkeypatch.setattr(chaos, "inject", inject)
    assert (code, "") == refusal("chaos", kind=kind, task="worker-0", at_step="50", timeout="9", json=True)
    assert {"kind": kind, "step": 52, "ended": "stopped"}.items() <= json.loads(capsys.readouterr().out).items()
    assert [(run, Fault(kind, "worker-0", 50), 9, True)] == injected  # which SIGTERM interrupts, so that it is undone


def test_no_bit_of_a_lone_task_is_flipped(make_run):
    alone = make_run("alone", workers=0)
    with pytest.raises(UsageError):
        registry.find_runtime(alone).injector(alone).check("flip", "chief")
