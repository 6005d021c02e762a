"""Faults that never come, that are refused, and how a fault is reported."""

import json
from typing import Any

import pytest
from invoke import Exit, MockContext

import tasks
from cluster.contract.run.folder import RunFolder
from cluster.host.control import chaos
from cluster.host.control.chaos import Fault, Result
from cluster.host.runtime import injector
from cluster.system.errors import TimedOut, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat
from tests.support.waiting import wait_for
from tests.unit.host.control.faulty import STEPS_ON, WORKS_ON, begin, recorded, slowing

# What never comes


def test_a_fault_whose_step_never_comes_is_not_inflicted(start_gang):
    gang = start_gang("train(5), meet(), finish()", workers=1)
    with pytest.raises(UsageError, match=r"run 'run' ended before step 100; nothing was inflicted"):
        chaos.inflict(gang.run, Fault("kill", "worker-0", at_step=100))
    assert ([], []) == (gang.events("fault"), recorded(gang))
    assert ("succeeded", []) == (gang.summary()["state"], gang.summary()["restarts"])


def test_waiting_for_the_step_is_bounded(start_gang):
    gang = begin(start_gang)
    with pytest.raises(TimedOut, match=r"waited 0.2 s for worker-0 to train and step 100; see `invoke status`"):
        chaos.inflict(gang.run, Fault("kill", "worker-0", at_step=100), timeout_s=0.2)
    assert [] == gang.events("fault")


def test_waiting_for_the_recovery_is_bounded(start_gang):
    gang = begin(start_gang, "if GENERATION: until(lambda: False)\n" + WORKS_ON)
    with pytest.raises(TimedOut, match=r"waited 0.5 s for the run to recover from kill worker-0; see `invoke status`"):
        chaos.inflict(gang.run, Fault("kill", "worker-0"), timeout_s=0.5)
    assert (1, []) == (len(gang.events("fault")), recorded(gang))
    wait_for(lambda: gang.run.generation == 1, "the gang's next generation")


def test_what_still_lasts_is_undone_when_nothing_recovers(start_gang, monkeypatch):
    monkeypatch.setattr(chaos._Before, "recovered", lambda self, fault: False)
    monkeypatch.setattr(chaos, "SLOW_S", 0.1)
    gang = begin(start_gang, STEPS_ON)
    with pytest.raises(TimedOut):
        chaos.inflict(gang.run, Fault("slow", "worker-0"), timeout_s=0.3)
    assert [] == slowing()
    gang.await_step("worker-0", gang.beat("worker-0").step + 20)


# How it is reported


@pytest.mark.parametrize(
    ("kind", "ended", "as_it_should"),
    [
        ("kill", None, True),
        ("kill", "succeeded", True),
        ("kill", "failed", False),
        ("kill", "stopped", False),
        ("stop", "stopped", True),
        ("stop", "succeeded", False),
        ("stop", None, False),
        ("diskfull", "failed", True),
        ("diskfull", None, False),
    ],
)
def test_a_fault_must_end_the_run_only_where_it_should(kind, ended, as_it_should):
    assert as_it_should == Result(kind, "chief", 5, 1.0, 2.0, 0, ended).as_it_should


@pytest.fixture
def run(make_run) -> RunFolder:
    """A run that trains, as far as its folder says."""
    made = make_run(workers=1)
    beat(made, "chief", step=5)
    (made.path.parent / ".current").write_text(made.name + "\n")
    return made


@pytest.mark.parametrize("kind", chaos.KINDS)
def test_every_other_kind_is_allowed_on_a_local_run(run, kind):
    if kind not in ("partition", "diskfull"):
        chaos.check(run, Fault(kind, "worker-0"))


def test_a_partition_is_allowed_between_containers(run):
    write_json(run.compose, {"x-runtime": "docker"})
    chaos.check(run, Fault("partition", "worker-0"))


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Fault("kil", "worker-0"), "chaos 'kil' is no fault; did you mean 'kill'?"),
        (Fault("strom", "worker-0"), "chaos 'strom' is no fault; did you mean 'storm'?"),
        (Fault("kill", "worker-7"), "no task 'worker-7' in this cluster; did you mean 'worker-0'?"),
        (
            Fault("pause", "worker-0", whole=True),
            "--whole with pause: it is for kill, which else kills the task's program alone",
        ),
        (
            Fault("partition", "worker-0"),
            "partition worker-0: local tasks share one network; use a run of --runtime docker",
        ),
    ],
)
def test_what_cannot_be_inflicted_is_refused_in_one_line(run, fault, line):
    with pytest.raises(UsageError) as refused:
        chaos.check(run, fault)
    assert line == str(refused.value)


def test_a_script_s_checkpoints_are_left_alone(run):
    write_json(run.config, {"script": "train.py", "arguments": []})
    with pytest.raises(UsageError, match=r"^corrupt with a script: its checkpoints are its own$"):
        chaos.check(run, Fault("corrupt", "worker-0"))


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_is_not_in_progress_is_refused(run, ended):
    if ended:
        write_json(run.summary, {"state": "succeeded"})
    else:
        beat(run, "chief", age_s=60)  # nothing of it lives
    with pytest.raises(UsageError, match=r"^run 'run' is not in progress; start one with `invoke up --detach`$"):
        chaos.check(run, Fault("kill", "worker-0"))


def ends(**options: Any) -> tuple[int, str]:
    with pytest.raises(Exit) as ended:
        tasks.ns["chaos"](MockContext(), **options)
    return ended.value.code, ended.value.message or ""


# The command line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "kill"}, "chaos kill"),
        ({"kind": "kil", "task": "worker-0"}, "'kill'"),
        ({"kind": "kill", "task": "worker-0", "at_step": "soon"}, "--at-step 'soon'"),
        ({"kind": "storm", "faults": "0"}, "--faults '0'"),
        ({"kind": "partition", "task": "worker-0"}, "partition worker-0"),
    ],
)
def test_wrong_usage_ends_with_2_and_injects_nothing(run, options, named):
    code, message = ends(**options)
    assert (2, 1) == (code, len(message.splitlines()))
    assert named in message
    assert ([], False) == (run.events(), (run.path / "chaos.jsonl").exists())


@pytest.mark.parametrize(("kind", "code"), [("kill", 1), ("stop", 0)])
def test_the_exit_code_reports_whether_the_run_did_as_it_should(run, monkeypatch, capsys, kind, code):
    inflicted = []

    def inflict(folder: RunFolder, fault: Fault, timeout_s: float) -> Result:
        inflicted.append((folder, fault, timeout_s))
        return Result(fault.kind, fault.task, 52, None, 1.0, 0, "stopped")

    monkeypatch.setattr(chaos, "inflict", inflict)
    requested = {"kind": kind, "task": "worker-0", "at_step": "50", "timeout": "9"}
    assert (code, "") == ends(**requested)
    assert f"{kind} worker-0 at step 52: the run stopped 1.0 s later\n" == capsys.readouterr().out
    assert (code, "") == ends(**requested, json=True)
    assert {"kind": kind, "task": "worker-0", "step": 52, "ended": "stopped"}.items() <= json.loads(
        capsys.readouterr().out
    ).items()
    assert [(run, Fault(kind, "worker-0", 50), 9)] * 2 == inflicted


def test_a_full_disk_that_is_everybody_s_is_refused_before_anything_is_done(start_gang, monkeypatch):
    gang = begin(start_gang)
    monkeypatch.setattr(injector, "MAX_BALLAST_BYTES", 0)
    monkeypatch.setattr(injector, "BALLAST", "absent/ballast")  # cannot be filled, whatever is decided
    with pytest.raises(UsageError, match="put RUNS_DIR on a small separate disk"):
        chaos.inflict(gang.run, Fault("diskfull", "worker-0"))
    assert ([], []) == (gang.events("fault"), recorded(gang))
    assert "training" == read_json(gang.run.status("chief"))["state"]


def test_a_disk_that_must_not_be_filled_is_refused_before_anything_is_waited_for(make_run):
    run = make_run(workers=0)
    with pytest.raises(UsageError, match="put RUNS_DIR on a small separate disk"):
        chaos.check(run, Fault("diskfull", "chief", at_step=10**9))
