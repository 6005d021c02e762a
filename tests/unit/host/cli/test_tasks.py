"""Dry runs, the commands that tasks run, and errors of the command line."""

import json
import os
import shlex
import signal
import subprocess
import sys
from typing import Any

import pytest
from invoke import Config, Context, Exit, MockContext, Result
from invoke.exceptions import ThreadException
from invoke.util import ExceptionWrapper

import tasks
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.cli.command_line import Runner, report_errors, shell
from cluster.host.control import foreground
from cluster.host.image import engine
from cluster.host.launch import folders, teardown, user_files
from cluster.host.runtime import supervisor
from cluster.host.runtime import tensorboard as board
from cluster.system.errors import EXIT_USAGE, TimedOut
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from tests.support.beats import beat
from tests.support.command_line import commands, context, current, refusal


def what_test_runs(*exited: int, **options: Any) -> tuple[int, list[str]]:
    """Return how `test` ends where its parts end so, and what each part's pytest was given."""
    c = MockContext(run=[Result(exited=code) for code in exited])
    code, message = refusal("test", c, **options)
    assert "" == message
    return code, [command.removeprefix(f"{shlex.quote(sys.executable)} -m pytest ") for command in commands(c)]


@pytest.mark.parametrize(
    ("exited", "expected"), [((1, 0), 1), ((0, 1), 1), ((-9, 0), -9), ((5, 0), 0), ((1, 5), 1), ((5, 5), 5)]
)
def test_a_failure_in_either_part_of_the_tests_is_reported_after_both(exited, expected):
    """5: none of the part's tests was selected, which is wrong only where the other has none either."""
    code, parts = what_test_runs(*exited, all=True)
    assert (expected, 2) == (code, len(parts))
    assert (2, 1) == (what_test_runs(2)[0], len(what_test_runs(2)[1]))  # interrupted, it goes no further
    assert 2 == refusal("test", MockContext(), all=True, fast=True)[0]
    assert "data.examine --name mine:data" in refusal("data.examine", MockContext())[1]


@pytest.mark.parametrize("task", ["evaluate", "export", "predict"])
def test_what_only_the_trainer_saves_is_not_sought_in_a_script_s_run(make_run, task):
    run, c = make_run(workers=0), context()
    write_json(run.config, {"script": "fit.py", "arguments": []})
    image = {"image": "boot.png"} if task == "predict" else {}
    assert (EXIT_USAGE, []) == (refusal(task, c, run=run.name, trust=True, **image)[0], commands(c))


def test_a_saved_model_is_read_with_the_modules_and_packages_of_its_run(make_run, tmp_path, monkeypatch):
    run, c = make_run(workers=0), context()
    (wanted := tmp_path / "mine.txt").write_text("precious\n")
    monkeypatch.setattr(user_files, "install_packages", lambda file, python: "/installed" if file == wanted else None)
    started = {"code_dirs": ["/my code"], "requirements": str(wanted), "env": ["WIDTH=9", "DEPTH"]}
    started |= {"secrets": [f"A_KEY={wanted}"]}
    write_json(run.control / "started.json", run.load_started().to_json() | started)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    tasks.ns["evaluate"](c, run=run.name, trust=True)
    (evaluates,) = map(shlex.split, commands(c))
    assert ["WIDTH=9", "PYTHONPATH=/my code:/installed:/theirs"] == evaluates[:2]
    assert ["-m", "train.saved_model", "evaluate"] == evaluates[3:6]
    assert ("precious", False) == (c.run.call_args.kwargs["env"]["A_KEY"], "precious" in commands(c)[0])
    wanted.unlink()
    assert (EXIT_USAGE, True) == ((found := refusal("evaluate", c, run=run.name, trust=True))[0], "A_KEY" in found[1])


@pytest.mark.parametrize(("task", "option"), [("export", "serving"), ("predict", "image"), ("predict", "features")])
def test_a_path_may_be_in_the_home_folder(make_run, monkeypatch, task, option):
    run, c = make_run(workers=0), context()
    monkeypatch.setenv("HOME", "/home/me")
    tasks.ns[task](c, run=run.name, trust=True, **{option: "~/mine"})
    assert [f"--{option}", "/home/me/mine"] == shlex.split(commands(c)[0])[-2:]


def test_a_watched_run_s_status_is_alone_on_the_output_as_json(make_run, monkeypatch, capsys):
    run = current(make_run(workers=0))
    monkeypatch.setattr(foreground, "show_until_end", lambda run: print("chief training"))
    tasks.ns["status"](context(), watch=True, json=True)
    shown = capsys.readouterr()
    assert (run.name, "chief training\n") == (json.loads(shown.out)["run"], shown.err)


def test_down_ends_a_run_even_if_it_does_not_stop(make_run, monkeypatch, capsys):
    run, killed = current(make_run(workers=0)), []

    def stop(folder: RunFolder, by: str, timeout_s: float) -> None:
        assert (run, "invoke down", 15) == (folder, by, timeout_s)
        raise TimedOut("it hangs")

    monkeypatch.setattr(teardown, "in_progress", lambda folder: True)
    monkeypatch.setattr(foreground, "stop", stop)
    monkeypatch.setattr(supervisor, "kill_run", killed.append)
    assert (0, "") == refusal("down", run="run")
    assert [run] == killed
    assert capsys.readouterr().out.startswith("run is down; its folder is ")


def test_down_ends_every_run_that_is_left_and_tensorboard(make_run, monkeypatch, capsys):
    left, stopped = make_run("left"), []
    make_run("ended")
    gone = RunFolder(left.path.with_name("gone"))
    for run in (left, gone):
        owner.create_owner(run, "local")
    monkeypatch.setattr(engine, "ask", lambda *words: (127, "docker is not installed"))
    monkeypatch.setattr(supervisor, "processes_left", lambda run, table: [1] if run in (left, gone) else [])
    monkeypatch.setattr(supervisor, "kill_run", stopped.append)
    monkeypatch.setattr(board, "stop", lambda runs_dir, sh: stopped.append(runs_dir) is None)
    assert (0, "") == refusal("down")
    assert [gone, left, folders.runs_dir()] == stopped
    assert "TensorBoard is down" == capsys.readouterr().out.splitlines()[-1]


# Errors: one line, and the right exit code


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


@pytest.mark.parametrize("name", ["RUN_WARN", "RUN_DISOWN", "RUN_ASYNCHRONOUS", "RUN_SHELL", "TIMEOUTS_COMMAND"])
def test_a_command_s_failure_is_reported_whatever_the_user_configures_for_invoke(monkeypatch, name):
    monkeypatch.setenv(f"INVOKE_{name}", "1")
    (config := Config()).load_shell_env()
    with pytest.raises(Exit) as ended:
        report_errors(lambda c: shell(c)("exit 3"))(Context(config))
    assert 3 == ended.value.code


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


def test_a_command_takes_an_interrupt_that_this_process_ignores():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in what a script starts by `&`
    runner = Runner(Context(Config()))
    runner.start("echo on; exec sleep 600", "/bin/sh", dict(os.environ))
    assert runner.process is not None
    assert b"on\n" == runner.process.stdout.readline()  # before, the shell itself would take it
    runner.send_interrupt(KeyboardInterrupt())
    try:
        assert -signal.SIGINT == runner.process.wait(30)
    finally:
        runner.kill()
