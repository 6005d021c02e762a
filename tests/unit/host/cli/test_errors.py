"""Errors of the command line: one line, and the right exit code."""

import os
import subprocess
import sys

import pytest
from invoke import Config, Context, Exit
from invoke.exceptions import ThreadException
from invoke.util import ExceptionWrapper

from cluster.contract.findings import Finding
from cluster.host.checks import doctor
from cluster.host.cli.command_line import report_errors
from cluster.host.cli.runner import Runner
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.host.runtime import compose_services
from cluster.system.json_files import write_json
from cluster.system.paths import ROOT
from tests.support.beats import beat
from tests.support.command_line import commands, context, current, refusal


def real_context() -> Context:
    """Return a context that runs commands, with the settings of invoke.yaml."""
    config = Config(project_location=str(ROOT))
    config.load_project()
    return Context(config)


@pytest.mark.parametrize(
    ("words", "unbuffered", "ends"),
    [
        ("plan --runtime local --json", "", (141, 0)),
        ("plan --runtime local --json", "1", (141, 0)),
        ("up --help", "", (141, 0)),
        ("up --help", "1", (141, 0)),
        ("--list", "", (141, 0)),
        ("status", "1", (2, 1)),  # what is wrong is reported all the same
    ],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(words, unbuffered, ends):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "invoke", *words.split()],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert ends == (done.returncode, len(done.stderr.splitlines())), done.stderr


def test_a_command_that_shows_another_s_output_to_nobody_ends_quietly():
    def show(c: Context, error: Exception) -> None:
        raise ThreadException([ExceptionWrapper({}, type(error), error, None)])

    with pytest.raises(Exit) as ended:
        report_errors(show)(Context(), BrokenPipeError())
    assert (141, None) == (ended.value.code, ended.value.message)
    with pytest.raises(ThreadException):
        report_errors(show)(Context(), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"))


@pytest.mark.parametrize(
    ("task", "requested", "expected"),
    [
        ("logs", {"task": "worker-7"}, "error: no task 'worker-7'"),
        ("logs", {"run": "a/b"}, "error: run name 'a/b'"),
        ("status", {"run": "rum"}, "error: there is no run 'rum' in "),
        ("wait", {"timeout": "soon"}, "error: --timeout 'soon'"),
        ("stop", {"run": "absent"}, "error: there is no run 'absent' in "),
        ("down", {"run": "absent"}, "error: there is no run 'absent' in "),
        ("tensorboard", {"port": "0"}, "error: --port '0'"),
        ("tensorboard", {"runtime": "podman"}, "error: --runtime 'podman'"),
    ],
)
def test_wrong_usage_ends_with_2_and_starts_nothing(make_run, task, requested, expected):
    current(make_run(workers=1))
    c = context()
    code, message = refusal(task, c, **requested)
    assert (2, 1, []) == (code, len(message.splitlines()), commands(c))
    assert message.startswith(expected)


def test_waiting_too_long_ends_with_4(make_run):
    run = current(make_run(workers=0))
    beat(run, "chief", step=1)
    message = "error: run run has not ended after 1 s; it continues, see `invoke status`"
    assert (4, message) == refusal("wait", timeout="1")


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("stopped", 130)])
def test_waiting_reports_how_the_run_ended(make_run, capsys, state, code):
    run = current(make_run(workers=0))
    values = {"steps": 5, "wall_s": 1.0, "startup_s": None, "metrics": {}, "restarts": []}
    write_json(run.summary, {"state": state} | values)
    assert (code, "") == refusal("wait")
    assert capsys.readouterr().out.startswith(f"{state}: 5 steps in 1.0 s\n")


def test_an_interrupt_ends_with_130(monkeypatch):
    def interrupt(request: Request, *, installs: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan", interrupt)
    assert (130, "interrupted") == refusal("up")


@pytest.mark.parametrize(("state", "code"), [("warning", 0), ("failed", 3)])
def test_the_doctor_ends_with_3_where_something_must_be_fixed(monkeypatch, state, code):
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("check", state, "found")])
    assert (code, "") == refusal("doctor")


def test_an_engine_that_stops_while_it_builds_ends_the_start(engine_that_fails, tmp_path, capfd):
    calls = engine_that_fails("build ")
    code, message = refusal("up", real_context(), name="one", runtime="docker", tensorboard_port="0")
    assert 1 == code
    assert message.startswith("error: ") and " && docker build " in message
    assert 1 == len(message.splitlines())
    assert "the engine is gone" in capfd.readouterr().err
    assert not (tmp_path / "runs" / "one").exists()
    assert " up " not in calls.read_text()


def test_an_engine_that_stops_half_way_leaves_nothing_behind(engine_that_fails, tmp_path):
    calls = engine_that_fails(" up ")
    code, message = refusal("up", real_context(), name="one", runtime="docker", tensorboard_port="0")
    assert 1 == code
    assert message.startswith("error: ") and " && docker compose " in message
    up, down = calls.read_text().splitlines()[-2:]
    run_dir = tmp_path / "runs" / "one"
    assert str(run_dir / "compose.json") in up
    assert f" --project-name {compose_services.project(run_dir)} " in down
    assert down.endswith(" down --timeout 10 --volumes --remove-orphans")


def test_a_command_that_is_interrupted_before_anybody_waits_for_it_is_ended(monkeypatch):
    started: list[Runner] = []

    def interrupt(runner: Runner) -> None:
        started.append(runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "create_io_threads", interrupt)
    runner = Runner(Context(Config(overrides={"run": {"in_stream": False}})))
    with pytest.raises(KeyboardInterrupt):
        runner.run("sleep 600")
    assert [runner] == started
    assert runner.process is not None
    assert runner.process.wait(5) != 0
