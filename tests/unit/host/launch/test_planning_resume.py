"""A run that is there already: it is left alone, gone on with, or deleted where that was asked for."""

import time
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Role
from cluster.host.launch import planning, startup, teardown
from cluster.host.options.request import Request
from cluster.host.runtime import supervisor
from cluster.system.errors import EXIT_USAGE
from cluster.system.json_files import write_json
from tests.support.beats import beat
from tests.support.launching import Commands, refusal


def test_an_unknown_run_is_refused_with_the_nearest(resolved, make_run):
    make_run("monday")
    assert str(refusal(Request(resume="mondey"))).endswith("; did you mean 'monday'?")


@pytest.mark.parametrize("requested", [{"resume": "run"}, {"name": "run", "fresh": True}])
def test_a_run_in_progress_is_left_alone(resolved, make_run, requested):
    beat(make_run(workers=1), "chief", "training")
    error = refusal(Request(**requested))
    assert (EXIT_USAGE, True) == (error.exit_code, str(error).startswith("run 'run' is still in progress; `invoke "))


def test_a_run_whose_tasks_all_fell_silent_can_be_resumed(resolved, make_run):
    run = make_run(workers=1)
    beat(run, "chief", "training", age_s=60)
    beat(run, "worker-0", "done", age_s=60)  # it had ended; the chief and the supervisor were killed
    assert planning.plan(Request(resume="run", runtime="local")).resumes


def test_a_run_of_which_one_task_lives_is_in_progress(make_run):
    run = make_run(workers=1)
    beat(run, "worker-0", "done", age_s=60)
    beat(run, "chief", "training")
    assert teardown.in_progress(run)
    write_json(run.summary, {"state": "failed"})
    assert not teardown.in_progress(run)


def topology(run: RunFolder, **requested: Any) -> tuple[str, int, int, int]:
    """Return strategy, workers, parameter servers and devices of a resumed run."""
    cluster = planning.plan(Request(resume=run.name, runtime="local", **requested)).cluster
    return cluster.strategy, len(cluster.of(Role.WORKER)), len(cluster.of(Role.PS)), cluster.devices


@pytest.mark.parametrize(
    ("previous", "requested", "expected"),
    [
        ({"workers": 1}, {}, ("multiworker", 1, 0, 1)),
        ({"workers": 0}, {}, ("one", 0, 0, 1)),
        ({"workers": 3, "ps": 2, "devices": 2}, {}, ("ps", 3, 2, 2)),
        ({"workers": 0, "devices": 2, "strategy": "central"}, {}, ("central", 0, 0, 2)),
        ({"workers": 0, "devices": 2, "strategy": "central"}, {"devices": "4"}, ("central", 0, 0, 4)),
        ({"workers": 0, "devices": 2}, {"devices": "1"}, ("one", 0, 0, 1)),
        ({"workers": 1}, {"workers": "2"}, ("multiworker", 2, 0, 1)),
        ({"workers": 2}, {"workers": "0"}, ("one", 0, 0, 1)),
        ({"workers": 2}, {"ps": "1"}, ("ps", 2, 1, 1)),
        ({"workers": 2, "ps": 1}, {"workers": "0"}, ("one", 0, 0, 1)),
        ({"workers": 2, "ps": 1}, {"ps": "0"}, ("multiworker", 2, 0, 1)),
        ({"workers": 2, "ps": 1}, {"strategy": "multiworker"}, ("multiworker", 2, 0, 1)),
        ({"workers": 2}, {"strategy": "one"}, ("one", 0, 0, 1)),
        ({"workers": 0}, {"strategy": "multiworker"}, ("multiworker", 2, 0, 1)),
    ],
)
def test_a_resumed_run_keeps_its_topology_unless_another_is_given(resolved, make_run, previous, requested, expected):
    run = make_run(**previous)
    run.end("stopped")
    write_json(run.summary, {"state": "stopped"})
    assert expected == topology(run, **requested)


def test_a_resumed_run_keeps_its_evaluator(resolved, make_run):
    run = make_run(workers=0, evaluator=True)
    write_json(run.summary, {"state": "stopped"})
    assert planning.plan(Request(resume=run.name, runtime="local")).cluster.of(Role.EVALUATOR)


def test_a_fresh_start_deletes_the_old_folder(resolved, make_run, monkeypatch):
    monkeypatch.setattr(supervisor, "start", lambda run: None)
    run = make_run("again", workers=0)
    run.event("chief", "first step")
    requested = Request(name="again", fresh=True, runtime="local", tensorboard_port="0")
    startup.start(planning.plan(requested), Commands(), began=time.time())
    assert ([], 0) == (run.events(), run.generation)


def test_a_resumed_run_keeps_its_history_in_a_new_generation(resolved, make_run, monkeypatch):
    monkeypatch.setattr(supervisor, "start", lambda run: None)
    run = make_run("stopped", workers=2)
    run.event("chief", "checkpoint", step=200)
    beat(run, "chief", "stopped")
    run.end("stopped")
    write_json(run.summary, {"state": "stopped"})
    requested = Request(resume="stopped", runtime="local", tensorboard_port="0")
    startup.start(planning.plan(requested), Commands(), began=time.time())
    assert (1, 1, {}) == (len(run.events()), run.generation, run.heartbeats())
    assert (None, False) == (run.outcome, run.summary.exists())
