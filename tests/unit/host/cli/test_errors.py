"""Errors of the command line: one line, and the right exit code."""

import os
import subprocess
import sys

import pytest
from invoke import Config, Context, Exit
from invoke.exceptions import ThreadException
from invoke.util import ExceptionWrapper

from cluster.host.cli.command_line import Runner, report_errors
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.system.json_files import write_json
from cluster.system.paths import ROOT
from tests.support.beats import beat
from tests.support.command_line import commands, context, current, refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unbuffered", "ends"),
    [
        ("plan --runtime local --json", "1", (141, 0)),
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
    ("task", "requested"),
    [
        ("logs", {"task": "worker-7"}),
        ("status", {"run": "rum"}),
        ("wait", {"timeout": "soon"}),
        ("stop", {"run": "absent"}),
        ("down", {"run": "absent"}),
        ("down", {"run": "run", "all": True}),
        ("tensorboard", {"port": "0"}),
        ("tensorboard", {"runtime": "podman"}),
    ],
)
def test_wrong_usage_ends_with_2_and_starts_nothing(make_run, task, requested):
    current(make_run(workers=1))
    c = context()
    code, message = refusal(task, c, **requested)
    assert (2, 1, []) == (code, len(message.splitlines()), commands(c))
    assert next(iter(requested.values())) in message


def test_waiting_too_long_ends_with_4_and_otherwise_as_the_run_did(make_run, capsys):
    run = current(make_run(workers=0))
    beat(run, "chief", step=1)
    assert 4 == refusal("wait", timeout="1")[0]
    values = {"steps": 5, "wall_s": 1.0, "startup_s": None, "metrics": {}, "restarts": []}
    write_json(run.summary, {"state": "stopped"} | values)
    assert (130, "") == refusal("wait")
    assert "stopped: 5 steps" in capsys.readouterr().out


def test_an_interrupt_ends_with_130(monkeypatch):
    def interrupt(request: Request) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan", interrupt)
    assert (130, "interrupted") == refusal("up")


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
