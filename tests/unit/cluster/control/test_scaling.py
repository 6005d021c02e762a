"""`invoke scale`: what is refused while the run goes on undisturbed, and the swap itself, with fake trainers."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke import Exit, MockContext

import tasks
from cluster import spec
from cluster.control import scaling, watch
from cluster.errors import EXIT_PREREQUISITE, EXIT_TIMEOUT, EXIT_USAGE, ClusterError, TimedOut, UsageError
from cluster.launch import configuration, planning, startup
from cluster.launch.plan import Plan
from cluster.options.request import Request
from cluster.run import provenance
from cluster.run.folder import LOST_AFTER_S, SCALE, RunFolder
from cluster.runtime import memory as limits
from cluster.runtime.base import Shell
from cluster.runtime.local import supervisor
from cluster.runtime.local.runtime import processes_of
from cluster.system import memory
from cluster.system.json_files import read_json, write_json
from tests.unit.gang import Gang, StartGang
from tests.waiting import wait_for

MakeRun = Callable[..., RunFolder]
LASTING = """
train(4 if GENERATION else 3)
if not GENERATION: work()
until(lambda: (run.path / 'enough').exists()), finish()
"""
"""Trains until it is stopped, and in its next life until it is `enough`."""


def no_shell(command: str) -> None:
    pytest.fail(f"nothing is to be run: {command}")


@pytest.fixture(autouse=True)
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration, without the process that checks it."""
    monkeypatch.setattr(configuration, "resolve", lambda request, base, *_: (read_json(base), (), ""))


@pytest.fixture
def training(make_run: MakeRun) -> Callable[..., RunFolder]:
    """Makes a run whose every task has just written a heartbeat; none of them is there."""

    def make(config: dict[str, Any] | None = None, **topology: Any) -> RunFolder:
        run = make_run(**topology)
        write_json(run.config, {"global_batch": 96, "loop": "custom"} | (config or {}))
        provenance.write(run)
        beats(run)
        return run

    return make


def beats(run: RunFolder, age_s: float = 0, state: str = "training") -> None:
    """Have every task's last heartbeat be so old."""
    for task in run.load_cluster().tasks:
        values = {"task": task.name, "role": task.role, "state": state, "generation": run.generation, "step": 7}
        values |= {"restarts": 0, "examples_per_s": None, "loss": None, "updated_at": time.time() - age_s}
        write_json(run.status(task.name), values)


def scale_requested(run: RunFolder, age_s: float = 0) -> None:
    assert run.request_stop("invoke scale", then=SCALE)
    stop = run.control / "stop.json"
    write_json(stop, read_json(stop) | {"time": time.time() - age_s})


# Refusals: the run goes on undisturbed


def refusal(run: RunFolder, workers: str, ps: str = "") -> ClusterError:
    """Return the error that scaling is refused with; nothing may have been changed."""
    before = run.compose.read_text(), run.cluster.read_text(), run.generation
    with pytest.raises(ClusterError) as refused:
        scaling.scale(run, workers, ps, no_shell)
    assert before == (run.compose.read_text(), run.cluster.read_text(), run.generation)
    assert 1 == len(str(refused.value).splitlines())
    return refused.value


@pytest.mark.parametrize(
    ("topology", "workers", "ps", "message"),
    [
        ({"workers": 2}, "", "", "--workers is missing: say how many, such as --workers 1"),
        ({"workers": 2}, "two", "", "--workers 'two': expected a whole number from 0 to 512"),
        ({"workers": 2}, "-1", "", "--workers '-1': expected a whole number from 0 to 512"),
        ({"workers": 2}, "0", "1", "--ps 1 with --workers 0: parameter servers need workers"),
        ({"workers": 2}, "2", "", "run 'run' has 2 workers already"),
        ({"workers": 1, "ps": 1}, "", "1", "run 'run' has 1 worker and 1 parameter server already"),
        ({"workers": 2}, "4", "", "--workers 4: global batch 96 is not divisible by 5 replicas; use 1, 3 or 5 workers"),
        ({"workers": 1}, "4", "", "--workers 4: global batch 96 is not divisible by 5 replicas; use 2, 3 or 5 workers"),
        (
            {"workers": 0, "devices": 2},
            "200",
            "",
            "--workers 200: global batch 96 is not divisible by 402 replicas; use 15, 23 or 47 workers",
        ),
        (
            {"workers": 0, "devices": 32},
            "1",
            "",
            "--workers 1: global batch 96 is not divisible by 64 replicas; use 2 ",
        ),
        (
            {"workers": 0, "devices": 64},
            "1",
            "",
            "--workers 1: global batch 96 is not divisible by 128 replicas; no other number fits",
        ),
        ({"workers": 0, "strategy": "tpu"}, "1", "", "run 'run' trains on the cores of a TPU, whose number is fixed"),
    ],
)
def test_a_size_that_the_run_cannot_have_is_refused(
    training: Callable[..., RunFolder], topology: dict[str, Any], workers: str, ps: str, message: str
) -> None:
    run = training(**topology)
    error = refusal(run, workers, ps)
    assert (EXIT_USAGE, False) == (error.exit_code, run.stop_requested)
    assert str(error).startswith(message)


def test_virtual_shards_are_shared_by_any_number_of_workers_up_to_theirs(training: Callable[..., RunFolder]) -> None:
    """96 examples in 6 shards: 4 workers, which could not share the batch evenly, can share these."""
    run = training({"bitwise_elastic": 6}, workers=2)
    assert "--bitwise-elastic 6: 7 replicas share 6 virtual shards" in str(refusal(run, "6"))
    assert not run.stop_requested
    scaling._check_size(run, run.load_cluster(), spec.build(workers=4))


def test_a_run_that_has_ended_is_not_scaled(training: Callable[..., RunFolder]) -> None:
    run = training(workers=2)
    write_json(run.summary, {"state": "stopped"})
    message = "run 'run' is not in progress; `invoke up --resume run --workers 1` goes on with it"
    assert message == str(refusal(run, "1"))


def test_a_pipeline_is_cut_for_its_stages(training: Callable[..., RunFolder]) -> None:
    error = refusal(training(workers=1, strategy="pipeline"), "3")
    assert isinstance(error, UsageError)
    assert "--resume run --stages" in str(error)


def test_a_script_keeps_its_own_state(training: Callable[..., RunFolder]) -> None:
    run = training({"script": "/its/train.py"}, workers=2)
    assert str(refusal(run, "1")).startswith(
        "run 'run' is one of a script, which keeps its own state; `invoke stop run"
    )


def test_memory_counts_the_tasks_that_end(training: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: limits.TASK_MEMORY_BYTES)
    run = training(workers=1)
    error = refusal(run, "3")
    assert (EXIT_PREREQUISITE, False) == (error.exit_code, run.stop_requested)
    assert "4 tasks need about 2.3 GiB of memory, 1.8 GiB are free; use at most 3 tasks here" == str(error)
    startup.check_machine(scaling.plan(run, "2", ""), ending=2)


@pytest.mark.parametrize(("then", "what"), [("", "stopped"), (SCALE, "scaled")])
def test_a_run_that_is_being_stopped_is_left_alone(training: Callable[..., RunFolder], then: str, what: str) -> None:
    run = training(workers=2)
    assert run.request_stop("somebody", then=then)
    message = f"run 'run' is being {what} already; `invoke status --watch` shows it"
    assert message == str(refusal(run, "1"))
    assert ("somebody", then) == tuple(read_json(run.control / "stop.json")[key] for key in ("by", "then"))


def test_the_plan_keeps_what_was_not_asked_for(training: Callable[..., RunFolder]) -> None:
    run = training(workers=2, ps=1, evaluator=True)
    planned = scaling.plan(run, "1", "")
    assert ("ps", "local", True) == (planned.cluster.strategy, planned.runtime.name, planned.resumes)
    assert ["chief", "worker-0", "ps-0", "evaluator"] == [task.name for task in planned.cluster.tasks]
    assert "OneDeviceStrategy" == scaling.plan(run, "0", "").cluster.strategy_class


def test_the_command_passes_on_what_it_was_given(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, requested = make_run("named"), []
    monkeypatch.setattr(scaling, "scale", lambda *words, trust: requested.append((*words[:3], trust)) or 130)
    with pytest.raises(Exit) as ended:
        tasks.ns["scale"](MockContext(), workers="3", ps="1", run="named", trust=True)
    assert (130, [(run, "3", "1", True)]) == (ended.value.code, requested)


# The swap


def end_of(gang: Gang) -> dict[str, Any]:
    """Let a gang that lasts come to its end; return the summary."""
    (gang.run.path / "enough").touch()
    return gang.summary()


def fake_plan(run: RunFolder, lines: str, data: Path, **requested: str) -> Plan:
    """Return a plan whose tasks run the given lines instead of the training program."""
    planned = scaling.plan(run, requested.get("workers", ""), requested.get("ps", ""))
    program = [sys.executable, "-c", f"from tests.unit.trainer import *\n{lines}"]
    how = processes_of(planned.cluster, run.path, data, ["--", *program])
    return dataclasses.replace(planned, compose=how)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Scales a gang of fake trainers; what they do next is in `lines`."""

    def run_it(gang: Gang, lines: str = LASTING, **requested: str) -> int:
        for task in gang.run.load_cluster().tasks:
            gang.await_step(task.name, 0 if gang.run.load_cluster().serves(task) else 3)
        planned = fake_plan(gang.run, lines, tmp_path / "data", **requested)
        monkeypatch.setattr(scaling, "plan", lambda run, workers, ps, trust: planned)
        return scaling.scale(gang.run, requested.get("workers", ""), requested.get("ps", ""), no_shell)

    return run_it


@pytest.mark.parametrize(("before", "after"), [(2, 1), (0, 2)])
def test_a_run_goes_on_with_other_workers_while_somebody_waits(
    start_gang: StartGang, scale: Callable[..., int], capsys: pytest.CaptureFixture[str], before: int, after: int
) -> None:
    gang = start_gang(LASTING, workers=before)
    started, ended = read_json(gang.run.control / "started.json"), []
    waits = threading.Thread(target=lambda: ended.append(watch.follow(gang.run, lambda value: None, 60)))
    waits.start()
    assert 0 == scale(gang, workers=str(after))
    message = capsys.readouterr().out.splitlines()[-1]
    assert message.startswith(f"scaled from {before} to {after} workers at step 0 (3 steps done again: ")
    summary = end_of(gang)
    waits.join()
    assert [summary] == ended
    assert ("succeeded", 4, []) == (summary["state"], summary["steps"], summary["restarts"])
    assert {"chief": 0} | {f"worker-{index}": 0 for index in range(after)} == summary["tasks"]
    assert summary["wall_s"] > 0
    assert started == read_json(gang.run.control / "started.json")
    (scaled,) = gang.events("scaled")
    assert ("chief", 1) == (scaled["task"], scaled["generation"])
    assert {"workers_before": before, "workers_after": after, "ps_before": 0, "ps_after": 0} == scaled["detail"]
    assert set(summary["tasks"]) == set(gang.run.heartbeats())


def test_a_run_that_is_being_scaled_is_not_resumed(start_gang: StartGang, scale: Callable[..., int]) -> None:
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
        assert 0 == scale(gang, workers="2")
    finally:
        over.set()
        resumes.join()
    assert refusals
    assert [] == [each for each in refusals if not isinstance(each, UsageError)]
    assert 1 == gang.run.generation
    assert ("succeeded", 3) == (end_of(gang)["state"], len(gang.run.heartbeats()))


def test_the_step_is_that_of_the_newest_checkpoint(
    start_gang: StartGang, scale: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    gang = start_gang(LASTING, workers=2)
    write_json(gang.run.checkpoints / "ckpt-2.json", {})
    write_json(gang.run.checkpoints / "ckpt-3.json", {})
    scale(gang, workers="1")
    assert "scaled from 2 to 1 workers at step 3; every task trains again after " in capsys.readouterr().out
    assert [3] == [event["step"] for event in gang.events("scaled")]


def test_parameter_servers_are_mentioned(
    start_gang: StartGang, scale: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "if NAME.startswith(('worker', 'ps')): serve()\n" + LASTING
    gang = start_gang(lines, workers=1, ps=1)
    assert 0 == scale(gang, lines, workers="2", ps="2")
    message = "scaled from 1 worker and 1 parameter server to 2 workers and 2 parameter servers at step "
    assert message in capsys.readouterr().out
    assert {"chief": 0, "worker-0": 0, "worker-1": 0, "ps-0": 0, "ps-1": 0} == end_of(gang)["tasks"]


def test_a_stop_for_another_size_is_not_the_end(start_gang: StartGang) -> None:
    gang = start_gang("train(3), work()", workers=1)
    gang.await_step("chief", 3)
    gang.run.request_stop("a test", then=SCALE)
    wait_for(lambda: not supervisor.processes_left(gang.run), "the end of all processes", timeout_s=300)
    assert ("stopped", True, False) == (gang.outcome()["state"], gang.run.goes_on, gang.run.summary.exists())
    assert {"chief": "stopped", "worker-0": "stopped"} == {n: b["state"] for n, b in gang.run.heartbeats().items()}


def test_a_run_that_ends_by_itself_first_says_so(
    start_gang: StartGang, scale: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    gang = start_gang("train(3), until(lambda: run.stop_requested), finish()", workers=1)
    assert 0 == scale(gang, workers="2")
    output = capsys.readouterr().out
    assert "run ended before it was scaled\nsucceeded: 3 steps in" in output
    assert {"chief": 0, "worker-0": 0} == gang.summary()["tasks"]


def test_a_run_that_fails_first_has_failed(start_gang: StartGang, scale: Callable[..., int]) -> None:
    # It ends at once: a signal could still end the interpreter's teardown.
    end = "print('error: loss is nan', flush=True), os._exit(1)"
    gang = start_gang(f"train(3), until(lambda: run.stop_requested), {end}", workers=0)
    assert 1 == scale(gang, workers="1")
    assert ("failed", "loss is nan") == (gang.summary()["state"], gang.summary()["cause"]["error"])


def test_a_run_that_does_not_stop_in_time_goes_on(
    start_gang: StartGang, scale: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STOP_TIMEOUT_S", 0.2)
    lines = "train(3)\nif not GENERATION: work(saving_s=1)\ntrain(4), meet(), finish()"
    gang = start_gang(lines, workers=1)
    with pytest.raises(
        TimedOut, match=r"run run did not stop in 0\.2 s, so it was not scaled; once its tasks"
    ) as error:
        scale(gang, workers="2")
    assert EXIT_TIMEOUT == error.value.exit_code
    summary = gang.summary()
    assert ("succeeded", 1, []) == (summary["state"], gang.run.generation, summary["restarts"])
    assert {"chief": 0, "worker-0": 0} == summary["tasks"]


def test_somebody_s_stop_comes_before_another_size(start_gang: StartGang, scale: Callable[..., int]) -> None:
    gang = start_gang("train(3), work(saving_s=1)", workers=1)
    codes: list[int] = []
    scales = threading.Thread(target=lambda: codes.append(scale(gang, workers="2")))
    scales.start()
    wait_for(lambda: gang.run.scaling, "the request")
    assert "stopped" == watch.stop(gang.run, "invoke stop")["state"]
    scales.join()
    assert ([130], {"chief": 0, "worker-0": 0}) == (codes, gang.summary()["tasks"])


def test_a_stop_that_comes_between_the_clusters_is_not_lost(
    start_gang: StartGang, scale: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = startup.go_on

    def stopped_by_then(planned: Plan, sh: Shell) -> None:
        planned.run.insist_on_stop("invoke stop")
        go_on(planned, sh)

    monkeypatch.setattr(startup, "go_on", stopped_by_then)
    gang = start_gang(LASTING, workers=1)
    assert 130 == scale(gang, "until(lambda: False)", workers="2")
    assert ("stopped", 3) == (gang.summary()["state"], len(gang.summary()["tasks"]))


def test_a_cluster_that_cannot_be_started_leaves_a_stopped_run(
    start_gang: StartGang,
    scale: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gang = start_gang("train(3), work()", workers=1)

    def fail(run: RunFolder) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(supervisor, "start", fail)
    with pytest.raises(OSError, match="no more processes"):
        scale(gang, workers="2")
    assert ("stopped", False) == (read_json(gang.run.summary)["state"], gang.run.scaling)
    assert "run is stopped; `invoke up --resume run` goes on" in capsys.readouterr().out


def test_a_cluster_that_fails_at_once_ends_the_run(
    start_gang: StartGang, scale: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    gang = start_gang("train(3), work()", workers=1)
    assert 1 == scale(gang, "print('error: no such option'), sys.exit(2)", workers="0")
    assert "run was scaled from 1 to 0 workers at step 0 (3 steps done again: " in capsys.readouterr().out
    assert "no such option" == gang.summary()["cause"]["error"]


# Whoever watches


@pytest.mark.usefixtures("hurried")
def test_watchers_are_patient_with_a_run_that_is_being_scaled(training: Callable[..., RunFolder]) -> None:
    run = training(workers=1)
    beats(run, age_s=LOST_AFTER_S + 5, state="stopped")
    scale_requested(run)
    run.end("stopped", task="chief")
    looks: list[Any] = []

    def looked(value: Any) -> None:
        looks.append(value)
        if len(looks) > 2 * LOST_AFTER_S:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch.follow(run, looked)
    assert (True, False) == (run.goes_on, run.summary.exists())


@pytest.mark.usefixtures("hurried")
def test_watchers_end_a_run_whose_scaling_was_given_up(training: Callable[..., RunFolder]) -> None:
    run = training(workers=1)
    beats(run, age_s=LOST_AFTER_S + 5, state="stopped")
    scale_requested(run)
    run.end("stopped", task="chief")
    ended = watch.follow(run, lambda value: None, timeout_s=300)
    assert ("failed", 1) == (ended["state"], watch.exit_code(ended))
    assert (
        "every task saved and ended to be scaled, but `invoke scale` did not go on in 180 s" == ended["cause"]["error"]
    )
    assert planning.plan(planning.Request(resume="run", runtime="local")).resumes


@pytest.mark.usefixtures("hurried")
def test_a_stop_after_a_scaler_s_death_ends_the_run(training: Callable[..., RunFolder]) -> None:
    run = training(workers=1)
    beats(run, age_s=LOST_AFTER_S + 5, state="stopped")
    scale_requested(run)
    run.end("stopped", task="chief")
    assert "stopped" == watch.stop(run, "invoke stop", timeout_s=10)["state"]


def test_a_run_may_be_scaled_before_it_trains(training: Callable[..., RunFolder]) -> None:
    run = training(workers=1)
    (run.path / "status" / "worker-0.json").unlink()
    smaller, seen = scaling.plan(run, "0", "").cluster.to_json(), []

    def shrink(value: dict[str, Any]) -> None:
        seen.append([beat["task"] for beat in value["tasks"]])
        write_json(run.cluster, smaller)

    assert watch.until_training(run, shrink)
    assert ["chief"] == seen[-1]


# The request to stop


def test_an_agent_s_sigterm_does_not_take_the_next_size_away(make_run: MakeRun) -> None:
    run = make_run()
    assert run.request_stop("invoke scale", then=SCALE)
    assert not run.request_stop("worker-0")
    assert run.scaling
    run.insist_on_stop("invoke stop")
    assert (True, False) == (run.stop_requested, run.scaling)
    run.insist_on_stop("another")
    assert "invoke stop" == read_json(run.control / "stop.json")["by"]


def test_only_one_s_own_stop_is_withdrawn(make_run: MakeRun) -> None:
    run = make_run()
    run.request_stop("invoke scale", then=SCALE)
    run.withdraw_stop()
    assert (False, True, False) == (run.stop_requested, run.stop_withdrawn(0), run.stop_withdrawn(1))
    run.request_stop("invoke stop")
    run.withdraw_stop()
    assert (True, False) == (run.stop_requested, run.stop_withdrawn(0))
