"""Sweeps: which values they refuse, the command of each trial, and which trials successive halving stops."""

import math
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host import sweep
from cluster.host.launch import folders, planning
from cluster.host.options.request import Request
from cluster.host.sweep import Sweep, Trial, is_among_best, loss_at
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import write_json
from cluster.system.ports import free_ports
from tests.support.command_line import end_reader


@pytest.fixture
def tried(monkeypatch) -> list[Request]:
    """The requests that are planned before anything starts."""
    requests: list[Request] = []
    monkeypatch.setattr(planning, "plan", requests.append)
    return requests


@pytest.mark.parametrize(
    "over",
    [(), ("seed",), ("seed=",), ("=1",), ("seed=1", "seed=2"), ("name=a,b",), ("remat=yes",), ("seed=" + "1," * 1001,)],
)
def test_axes_without_values_to_compare_are_refused(tried, over):
    with pytest.raises(UsageError):
        sweep.plan_sweep(Request(name="s"), over, 0)
    assert [] == tried


def test_a_value_that_up_refuses_is_refused_before_anything_starts(monkeypatch):
    def refuse(request: Request) -> None:
        if "--optimizer.learning-rate=x" in request.overrides:
            raise UsageError("no number")

    monkeypatch.setattr(planning, "plan", refuse)
    with pytest.raises(UsageError):
        sweep.plan_sweep(Request(name="s"), ["seed=1,2", "optimizer.learning-rate=1e-3,x"], 0)
    assert not (folders.runs_dir() / ".sweeps").exists()


def test_every_combination_is_a_trial_and_every_value_is_tried_once(tried):
    request = Request(name="s", workers=1, env=("A=1",), train=("--epochs=2",), overrides=("--seed=7",))
    planned = sweep.plan_sweep(request, ["optimizer.learning_rate=1e-3,1e-2", "workers=0,2"], 0)
    values = [("1e-3", "0"), ("1e-3", "2"), ("1e-2", "0"), ("1e-2", "2")]
    assert values == [tuple(trial.values.values()) for trial in planned.trials]
    assert [0, 2, 0] == [each.workers for each in tried]
    command = sweep._Loop(planned, 1)._command(planned.trials[1])
    before, after = command[: command.index("--")], command[command.index("--") + 1 :]
    assert {"up", "--name=s-2", "--tag=s", "--env=A=1"} <= set(before)
    assert ["--workers=2"] == [word for word in before if word.startswith("--workers")]
    assert ["--epochs=2", "--seed=7", "--optimizer.learning-rate=1e-3"] == after


def test_each_trial_has_its_own_port_for_metrics(tried):
    free = free_ports(20)
    first = next(port for port in free if port + 1 in free)
    planned = sweep.plan_sweep(Request(name="s", metrics_port=first), ["seed=1,2"], 0)
    commands = [sweep._Loop(planned, 2)._command(trial) for trial in planned.trials]
    ports = [[word for word in command if word.startswith("--metrics-port")] for command in commands]
    assert [[f"--metrics-port={first}"], [f"--metrics-port={first + 1}"]] == ports
    with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(PrerequisiteError):
        sweep.plan_sweep(Request(name="s", metrics_port=first), ["seed=1,2"], 0)
    with pytest.raises(UsageError):
        sweep.plan_sweep(Request(name="s", metrics_port=65535), ["seed=1,2"], 0)


def test_what_became_of_a_trial_decides_its_command(tried, make_run):
    trials = tuple(Trial(run=name, values={"seed": "1"}) for name in ("done", "failed", "stopped", "dropped", "new"))
    for trial in trials[:-1]:
        run: RunFolder = make_run(trial.run)
        state = {"done": "succeeded", "failed": "failed"}.get(trial.run, "stopped")
        run.end(state)
        write_json(run.summary, {"state": state})
    planned = Sweep(name="s", options=(), overrides=(), trials=trials, dropped={"dropped": 10})
    found = {trial.run: sweep._Loop(planned, 1)._command(trial)[:3] for trial in trials}
    assert found["stopped"] == ["up", "--resume", "stopped"]
    assert found["new"] == ["up", "--name=new", "--tag=s"]
    assert [] == found["done"] == found["failed"] == found["dropped"]


def test_a_trial_that_a_killed_sweep_has_dropped_is_still_stopped(make_run):
    run, trial = make_run("bad"), Trial(run="bad", values={"seed": "1"})
    planned = Sweep(name="s", options=(), overrides=(), trials=(trial,), halving=10, dropped={"bad": 10})
    sweep._Loop(planned, 1)._halve(trial)
    assert run.stop_requested


def test_an_interrupt_that_also_ends_the_reader_of_the_output_reaches_every_trial(monkeypatch):
    signals: list[int] = []
    loop = sweep._Loop(Sweep(name="s", options=(), overrides=(), trials=()), 1)
    loop._running["s-1"] = SimpleNamespace(args=["up"], send_signal=signals.append, wait=lambda: 0)
    end_reader(monkeypatch)
    loop.interrupt()
    assert [signal.SIGTERM] == signals  # SIGINT is ignored in what a script starts by `&`


@pytest.mark.parametrize(
    ("reached", "good"),
    [
        ({"a": 5.0}, True),
        ({"a": 5.0, "b": 4.0}, False),
        ({"a": 3.0, "b": 4.0}, True),
        ({"a": 2.0, "b": 1.0, "c": 3.0, "d": 4.0}, True),
        ({"a": 3.0, "b": 1.0, "c": 2.0, "d": 4.0}, False),
        ({"a": sweep.MAX}, False),
    ],
)
def test_the_best_third_of_those_at_a_rung_continues(reached, good):
    assert good is is_among_best(reached, "a")


def test_an_evaluation_counts_more_than_the_loss_of_a_batch():
    rows: list[dict[str, Any]] = [{"step": 5, "eval_loss": 2.0}, {"step": 9, "loss": 1.0}, {"step": 12, "loss": 0.5}]
    assert [1.0, 2.0, 1.0] == [loss_at(rows[1:], 10), loss_at(rows, 10), loss_at(rows[1:], 11)]
    assert [5, 8] == [sweep.last_complete_step(rows[:count]) for count in (1, 2)]
    assert [sweep.MAX] * 2 == [loss_at(rows, 4), loss_at([{"step": 1, "loss": math.nan}], 4)]


@pytest.mark.parametrize(("metric", "expected"), [("eval_accuracy", ["b", "a", "c"]), ("eval_loss", ["a", "b", "c"])])
def test_the_best_score_is_listed_first(make_run, metric, expected):
    for name, metrics in {"a": {metric: 0.5}, "b": {metric: 0.9}, "c": {}}.items():
        run = make_run(name)
        run.end("succeeded")
        write_json(run.summary, {"state": "succeeded", "metrics": metrics})
        write_json(run.control / "started.json", {"time": 1.0, "runtime": "local", "tags": ["s"]})
    assert expected == [row["run"] for row in sweep.best_first("s")]
