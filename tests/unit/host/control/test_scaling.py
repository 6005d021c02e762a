"""`invoke scale`: refusals, the request to stop, watchers, and one cluster after another on real agents."""

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.contract import spec
from cluster.contract.run import claim, heartbeat, membership, provenance
from cluster.contract.run.folder import LOST_AFTER_S, RunFolder
from cluster.contract.run.records import AfterStop
from cluster.host.control import foreground, scaling
from cluster.host.launch import planning, startup
from cluster.host.launch.plan import Plan
from cluster.host.reports import listing
from cluster.host.runtime import resources as limits
from cluster.host.runtime import supervisor
from cluster.host.runtime.base import Shell
from cluster.host.runtime.local_runtime import processes_of
from cluster.host.view.status import read_status
from cluster.system import memory
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE, ClusterError, TimedOut, UsageError
from cluster.system.json_files import read_json, write_json
from cluster.system.messages import counted
from tests.support.beats import beat_all
from tests.support.gang import Gang
from tests.support.launching import no_shell
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("recorded_configuration")


@pytest.fixture
def training(make_run) -> Callable[..., RunFolder]:
    """Makes a run whose every task has just written a heartbeat; none of them is there."""

    def make(config: dict[str, Any] | None = None, **topology: Any) -> RunFolder:
        run = make_run(**topology)
        write_json(run.config, {"global_batch": 96, "loop": "custom"} | (config or {}))
        provenance.write_note(run)
        return beat_all(run, step=7)

    return make


@pytest.fixture
def orphaned(training) -> Callable[..., RunFolder]:
    """Makes a run whose every task ended to be scaled, without the command that would start it again."""

    def make(age_s: float = LOST_AFTER_S + 5) -> RunFolder:
        run = beat_all(training(workers=1), "stopped", age_s=age_s, step=7)
        assert run.request_stop("invoke scale", then=AfterStop.SCALE)
        run.end("stopped", task="chief")
        return run

    return make


def refusal(run: RunFolder, workers: int | None, ps: int | None = None) -> ClusterError:
    """Return the error that scaling is refused with; nothing may have been changed."""
    before = run.compose.read_text(), run.cluster.read_text(), run.generation
    with pytest.raises(ClusterError) as refused:
        scaling.scale_run(run, no_shell, workers=workers, ps=ps)
    assert before == (run.compose.read_text(), run.cluster.read_text(), run.generation)
    assert 1 == len(str(refused.value).splitlines())
    return refused.value


@pytest.mark.parametrize(
    ("topology", "workers", "ps", "named"),
    [
        ({"workers": 2}, None, None, "--workers"),
        ({"workers": 2}, 0, 1, "--ps 1"),
        ({"workers": 2}, 2, None, "2 workers already"),
        ({"workers": 1, "ps": 1}, None, 1, "already"),
        ({"workers": 2}, 4, None, "use 1, 3 or 5 workers"),
        ({"workers": 0, "devices": 2}, 200, None, "use 15, 23 or 47 workers"),
        ({"workers": 0, "devices": 32}, 1, None, "use 2 "),
        ({"workers": 0, "devices": 64}, 1, None, "no other number"),
        ({"workers": 0, "strategy": "tpu"}, 1, None, "TPU"),
        ({"workers": 1, "strategy": "pipeline"}, 3, None, "--resume run --stages"),
        ({"workers": 2, "config": {"script": "/its/train.py"}}, 1, None, "invoke stop run"),
    ],
)
def test_a_size_that_the_run_cannot_have_is_refused(training, topology, workers, ps, named):
    run = training(**topology)
    error = refusal(run, workers, ps)
    assert (EXIT_USAGE, False) == (error.exit_code, run.stop_requested)
    assert named in str(error)


@pytest.mark.parametrize("prepared", ["arrays/mine-data-0123", "functions/mine-data-0123.json"])
def test_a_run_whose_data_is_elsewhere_is_not_scaled(training, tmp_path, prepared):
    run = training(workers=2)
    write_json(run.data_version, {"version": "0123", "num_shards": 0})
    assert f"is not in {tmp_path / 'data'}; set DATA_DIR" in str(refusal(run, 1))
    (tmp_path / "data" / prepared).mkdir(parents=True)
    scaling.plan_scaling(run, 1)


def test_virtual_shards_are_shared_by_any_number_of_workers_up_to_theirs(training):
    """96 examples in 6 shards: 4 workers, which could not share the batch evenly, can share these."""
    run = training({"bitwise_elastic": 6}, workers=2)
    assert "--bitwise-elastic 6: 7 replicas share 6 virtual shards" in str(refusal(run, 6))
    assert not run.stop_requested
    scaling._check_size(run, run.load_cluster(), spec.build(workers=4))


def test_memory_counts_the_tasks_that_end(training, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: limits.TASK_MEMORY_BYTES)
    run = training(workers=1)
    error = refusal(run, 3)
    assert (EXIT_PREREQUISITE, False) == (error.exit_code, run.stop_requested)
    assert "use at most 3 tasks" in str(error)
    startup.check_machine(scaling.plan_scaling(run, 2), ending=2)


def test_only_a_run_that_continues_is_scaled(training):
    run = training(workers=2)
    assert run.request_stop("somebody")
    assert "stopped already" in str(refusal(run, 1))
    assert ("somebody", "") == tuple(read_json(run.control / "stop.json")[key] for key in ("by", "then"))
    write_json(run.summary, {"state": "stopped"})
    assert "--resume run --workers 1" in str(refusal(run, 1))


def test_the_request_of_a_killed_command_is_taken_over(training):
    run = training(workers=2)
    assert run.request_stop("invoke scale", then=AfterStop.SCALE)
    run.end("stopped", task="chief")
    assert scaling.stop_for_scaling(run)


@pytest.mark.parametrize("age_s", [1.0, LOST_AFTER_S + 5])
def test_a_run_whose_scaling_was_killed_can_be_resumed_at_once(orphaned, monkeypatch, age_s):
    run = orphaned(age_s)
    resume = planning.Request(resume="run", runtime="local")
    with claim.hold_claim(run, "scaled"), monkeypatch.context() as patch:
        patch.setattr(claim, "_mine", set())  # by another process
        assert None is heartbeat.final_state(run)
        with pytest.raises(UsageError):
            planning.plan(resume)
    assert "stopped" == heartbeat.final_state(run) == read_status(run)["state"] == listing.describe_run(run)["result"]
    assert planning.plan(resume).resumes


def test_the_plan_keeps_what_was_not_asked_for(training):
    run = training(workers=2, ps=1, evaluator=True)
    planned = scaling.plan_scaling(run, 1)
    assert ("ps", "local", True) == (planned.cluster.strategy, planned.runtime.name, planned.resumes)
    assert ["chief", "worker-0", "ps-0", "evaluator"] == [task.name for task in planned.cluster.tasks]
    assert "OneDeviceStrategy" == scaling.plan_scaling(run, 0).cluster.strategy_class


@pytest.mark.usefixtures("hurried")
def test_watchers_are_patient_with_a_run_that_is_being_scaled(orphaned, monkeypatch):
    run = orphaned()
    looks: list[Any] = []

    def looked(value: Any) -> None:
        looks.append(value)
        if len(looks) > 2 * LOST_AFTER_S:
            raise KeyboardInterrupt

    with claim.hold_claim(run, "scaled"), monkeypatch.context() as patch:
        patch.setattr(claim, "_mine", set())  # by another process
        with pytest.raises(KeyboardInterrupt):
            foreground.follow(run, looked)
    assert (True, False) == (run.continues_elsewhere, run.summary.exists())


@pytest.mark.usefixtures("hurried")
def test_watchers_end_a_run_whose_scaling_was_given_up(orphaned):
    ended = foreground.follow(orphaned(), lambda value: None, timeout_s=300)
    assert ("failed", 1) == (ended.state, foreground.exit_code(ended))
    assert "`invoke scale` ended before" in ended.cause.error
    assert planning.plan(planning.Request(resume="run", runtime="local")).resumes


@pytest.mark.usefixtures("hurried")
def test_a_stop_after_a_scaler_s_death_ends_the_run(orphaned):
    assert "stopped" == foreground.stop(orphaned(), "invoke stop", timeout_s=10).state


def test_a_run_may_be_scaled_before_it_trains(training):
    run = training(workers=1)
    (run.path / "status" / "worker-0.json").unlink()
    smaller, seen = scaling.plan_scaling(run, 0).cluster.to_json(), []

    def shrink(value: dict[str, Any]) -> None:
        seen.append([beat["task"] for beat in value["tasks"]])
        write_json(run.cluster, smaller)

    assert foreground.until_training(run, shrink)
    assert ["chief"] == seen[-1]


def test_an_agent_s_sigterm_does_not_take_the_next_size_away(run):
    assert run.request_stop("invoke scale", then=AfterStop.SCALE)
    assert not run.request_stop("worker-0")
    assert run.after_stop == "scale"
    run.insist_on_stop("invoke stop")
    assert (True, False) == (run.stop_requested, run.after_stop == "scale")
    run.insist_on_stop("another")
    assert "invoke stop" == read_json(run.control / "stop.json")["by"]


def test_only_one_s_own_stop_is_withdrawn(run):
    run.request_stop("invoke scale", then=AfterStop.SCALE)
    run.withdraw_stop()
    assert (False, True, False) == (run.stop_requested, run.stop_withdrawn(0), run.stop_withdrawn(1))
    run.request_stop("invoke stop")
    run.withdraw_stop()
    assert (True, False) == (run.stop_requested, run.stop_withdrawn(0))


# On real agents with fake trainers: one cluster ends, and the next begins


LASTING = """
train(4 if GENERATION else 3)
if not GENERATION: work()
until(lambda: (run.path / 'enough').exists()), finish()
"""
"""Trains until it is stopped, and in its next generation until it is `enough`."""


def end_of(gang: Gang) -> dict[str, Any]:
    (gang.run.path / "enough").touch()
    return gang.summary()


@pytest.fixture
def scale(monkeypatch, tmp_path) -> Callable[..., int]:
    """Scales a gang of fake trainers; what they do next is in `lines`."""

    def run_it(gang: Gang, lines: str = LASTING, **requested: int) -> int:
        for task in membership.cluster(gang.run).tasks:
            gang.await_step(task.name, 0 if gang.run.load_cluster().serves(task) else 3)
        planned = scaling.plan_scaling(gang.run, requested["workers"], requested.get("ps"))
        program = ["--", sys.executable, "-c", f"from tests.programs.trainer import *\n{lines}"]
        fake = processes_of(planned.cluster, gang.run.path, tmp_path / "data", program)
        planned = dataclasses.replace(planned, compose=fake)
        monkeypatch.setattr(scaling, "plan_scaling", lambda run, workers, ps, trust: planned)
        return scaling.scale_run(gang.run, no_shell, **requested)

    return run_it


@pytest.mark.extended
@pytest.mark.parametrize(("before", "after"), [(2, 1), (0, 2)])
def test_a_run_continues_with_other_workers_while_somebody_waits(start_gang, scale, capsys, before, after):
    gang = start_gang(LASTING, workers=before, hang_timeout_s=90)
    started, ended = read_json(gang.run.control / "started.json"), []
    waits = threading.Thread(target=lambda: ended.append(foreground.follow(gang.run, lambda value: None, 60)))
    waits.start()
    assert 0 == scale(gang, workers=after)
    sizes = f"from {counted(before, 'worker')} to {counted(after, 'worker')}"
    assert f"{sizes} at step 0 (3 steps " in capsys.readouterr().out
    summary = end_of(gang)
    waits.join()
    assert [summary] == [each.to_json() for each in ended]
    assert ("succeeded", 4, []) == (summary["state"], summary["steps"], summary["restarts"])
    assert {"chief": 0} | {f"worker-{index}": 0 for index in range(after)} == summary["tasks"]
    assert summary["wall_s"] > 0
    assert started == read_json(gang.run.control / "started.json")
    (scaled,) = gang.events("scaled")
    assert ("chief", 1) == (scaled.task, scaled.generation)
    assert {"workers_before": before, "workers_after": after, "ps_before": 0, "ps_after": 0} == scaled.detail
    assert set(summary["tasks"]) == set(gang.run.heartbeats())


@pytest.mark.extended
def test_parameter_servers_continue_at_the_newest_checkpoint(start_gang, scale):
    lines = "if NAME.startswith(('worker', 'ps')): serve()\n" + LASTING
    gang = start_gang(lines, workers=1, ps=1)
    for step in (2, 3):
        write_json(gang.run.checkpoints / f"ckpt-{step}.json", {})
    assert 0 == scale(gang, lines, workers=2, ps=2)
    assert [3] == [event.step for event in gang.events("scaled")]
    assert {"chief": 0, "worker-0": 0, "worker-1": 0, "ps-0": 0, "ps-1": 0} == end_of(gang)["tasks"]


@pytest.mark.extended
def test_a_worker_that_was_left_out_is_brought_in(start_gang, scale, monkeypatch):
    monkeypatch.setenv("RENDEZVOUS_TIMEOUT_S", "5")
    lines = LASTING.replace("if not GENERATION", "if run.generation_record(GENERATION).left_out")
    gang = start_gang(lines, workers=2, elastic={"min_workers": 1, "grow": False}, away=("chief", "worker-0"))
    wait_for(lambda: gang.beat("worker-1").state == "waiting", "worker-1 at the rendezvous")
    gang.run.away("chief").unlink()
    wait_for(lambda: gang.run.generation == 1, "the run to continue without worker-0")
    assert 0 == scale(gang, lines, workers=2)
    summary = end_of(gang)
    assert ("succeeded", 3) == (summary["state"], summary["replicas"])
    assert {"chief": 0, "worker-0": 0, "worker-1": 0} == summary["tasks"]
    assert [["worker-0"], []] == [change["left_out"] for change in summary["membership"]]


@pytest.mark.parametrize(
    ("ends", "code", "state", "tasks"),
    [
        ("finish()", 0, "succeeded", {"chief": 0, "worker-0": 0}),
        # It ends at once: a signal could still end the interpreter's teardown.
        ("print('error: loss is nan', flush=True), os._exit(1)", 1, "failed", {}),
    ],
)
def test_a_run_that_ends_by_itself_first_says_so(start_gang, scale, capsys, ends, code, state, tasks):
    gang = start_gang(f"train(3), until(lambda: run.stop_requested), {ends}", workers=len(tasks) // 2)
    assert code == scale(gang, workers=2)
    assert "ended before it was scaled" in capsys.readouterr().out
    summary = gang.summary()
    assert state == summary["state"]
    assert tasks.items() <= summary["tasks"].items()
    assert state == "succeeded" or summary["cause"]["error"] == "loss is nan"


def test_a_run_that_does_not_stop_in_time_continues(start_gang, scale, monkeypatch):
    monkeypatch.setattr(foreground, "stop_timeout_s", lambda run: 0.2)
    saves = "until(lambda: run.stop_requested or run.stop_withdrawn(0)), until(lambda: not run.stop_requested)"
    gang = start_gang(f"train(3)\nif not GENERATION: {saves}, finish('stopped')\ntrain(4), meet(), finish()", workers=1)
    with pytest.raises(TimedOut):
        scale(gang, workers=2)
    summary = gang.summary()
    assert ("succeeded", 1, []) == (summary["state"], gang.run.generation, summary["restarts"])
    assert {"chief": 0, "worker-0": 0} == summary["tasks"]


def test_somebody_s_stop_comes_before_another_size(start_gang, scale):
    gang = start_gang("train(3), until(lambda: run.after_stop == ''), finish('stopped')", workers=1)
    codes: list[int] = []
    scales = threading.Thread(target=lambda: codes.append(scale(gang, workers=2)))
    scales.start()
    wait_for(lambda: gang.run.after_stop == "scale", "the request")
    assert "stopped" == foreground.stop(gang.run, "invoke stop").state
    scales.join()
    assert ([130], {"chief": 0, "worker-0": 0}) == (codes, gang.summary()["tasks"])


def test_a_stop_that_comes_between_the_clusters_is_not_lost(start_gang, scale, monkeypatch):
    resume = startup.continue_run

    def stopped_by_then(planned: Plan, sh: Shell) -> None:
        planned.run.insist_on_stop("invoke stop")
        resume(planned, sh)

    monkeypatch.setattr(startup, "continue_run", stopped_by_then)
    gang = start_gang(LASTING, workers=1)
    assert 130 == scale(gang, "until(lambda: False)", workers=2)
    assert ("stopped", 3) == (gang.summary()["state"], len(gang.summary()["tasks"]))


def test_a_cluster_that_cannot_be_started_leaves_a_stopped_run(start_gang, scale, monkeypatch, capsys):
    gang = start_gang("train(3), work()", workers=1)
    monkeypatch.setattr(supervisor, "start_supervisor", Mock(side_effect=OSError("no more processes")))
    with pytest.raises(OSError, match="no more processes"):
        scale(gang, workers=2)
    assert ("stopped", False) == (read_json(gang.run.summary)["state"], gang.run.after_stop == "scale")
    assert "`invoke up --resume run`" in capsys.readouterr().out
