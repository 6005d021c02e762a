"""`invoke scale` on real agents with fake trainers: one cluster ends, and the next begins."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.host.control import foreground, scaling
from cluster.host.launch import planning, startup
from cluster.host.launch.plan import Plan
from cluster.host.options.request import Request
from cluster.host.runtime import supervisor
from cluster.host.runtime.base import Shell
from cluster.host.runtime.local_runtime import processes_of
from cluster.system.errors import TimedOut, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.gang import Gang
from tests.support.launching import no_shell
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("recorded_configuration")

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
def test_a_run_goes_on_with_other_workers_while_somebody_waits(start_gang, scale, capsys, before, after):
    gang = start_gang(LASTING, workers=before, hang_timeout_s=90)
    started, ended = read_json(gang.run.control / "started.json"), []
    waits = threading.Thread(target=lambda: ended.append(foreground.follow(gang.run, lambda value: None, 60)))
    waits.start()
    assert 0 == scale(gang, workers=after)
    assert f"from {before} to {after} workers at step 0 (3 steps " in capsys.readouterr().out
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
    lines = LASTING.replace("if not GENERATION", "if run.begun(GENERATION).left_out")
    gang = start_gang(lines, workers=2, elastic={"min_workers": 1, "grow": False}, away=("chief", "worker-0"))
    wait_for(lambda: gang.beat("worker-1").state == "waiting", "worker-1 at the rendezvous")
    gang.run.away("chief").unlink()
    wait_for(lambda: gang.run.generation == 1, "the run to continue without worker-0")
    assert 0 == scale(gang, lines, workers=2)
    summary = end_of(gang)
    assert ("succeeded", 3) == (summary["state"], summary["replicas"])
    assert {"chief": 0, "worker-0": 0, "worker-1": 0} == summary["tasks"]
    assert [["worker-0"], []] == [change["left_out"] for change in summary["membership"]]


@pytest.mark.slow
def test_a_run_that_is_being_scaled_is_not_resumed(start_gang, scale):
    """It is tried all the time: while tasks save, between the clusters, and while the new one starts."""
    gang, over = start_gang(LASTING, workers=1), threading.Event()
    refusals: list[object] = []

    def resume() -> None:
        while not over.is_set():
            try:
                request = Request(resume=gang.run.name, runtime="local", tensorboard_port="0")
                refusals.append(startup.start(planning.plan(request), no_shell, began=time.time()))
            except Exception as error:
                refusals.append(error)

    resumes = threading.Thread(target=resume)
    resumes.start()
    try:
        assert 0 == scale(gang, workers=2)
    finally:
        over.set()
        resumes.join()
    assert refusals
    assert [] == [each for each in refusals if not isinstance(each, UsageError)]
    assert 1 == gang.run.generation
    assert ("succeeded", 3) == (end_of(gang)["state"], len(gang.run.heartbeats()))


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


def test_a_run_that_does_not_stop_in_time_goes_on(start_gang, scale, monkeypatch):
    monkeypatch.setattr(foreground, "STOP_TIMEOUT_S", 0.2)
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
    go_on = startup.continue_run

    def stopped_by_then(planned: Plan, sh: Shell) -> None:
        planned.run.insist_on_stop("invoke stop")
        go_on(planned, sh)

    monkeypatch.setattr(startup, "continue_run", stopped_by_then)
    gang = start_gang(LASTING, workers=1)
    assert 130 == scale(gang, "until(lambda: False)", workers=2)
    assert ("stopped", 3) == (gang.summary()["state"], len(gang.summary()["tasks"]))


def test_a_cluster_that_cannot_be_started_leaves_a_stopped_run(start_gang, scale, monkeypatch, capsys):
    gang = start_gang("train(3), work()", workers=1)

    def fail(run: RunFolder) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(supervisor, "start_supervisor", fail)
    with pytest.raises(OSError, match="no more processes"):
        scale(gang, workers=2)
    assert ("stopped", False) == (read_json(gang.run.summary)["state"], gang.run.after_stop == "scale")
    assert "`invoke up --resume run`" in capsys.readouterr().out
