"""Dry runs, and the commands that tasks run."""

import shlex
import sys
from typing import Any

import pytest
from invoke import MockContext, Result

import tasks
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.control import foreground
from cluster.host.image import engine
from cluster.host.launch import folders, packages, startup, teardown
from cluster.host.runtime import supervisor
from cluster.host.runtime import tensorboard as board
from cluster.system.errors import EXIT_USAGE, TimedOut
from cluster.system.json_files import write_json
from tests.support.command_line import commands, context, current, invoke, refusal


def test_a_dry_run_prints_what_local_processes_would_be_started_with(tmp_path):
    done = invoke("up", "--dry", "--runtime=local", "--name=one", "--workers=1", "--", "--epochs", "1")
    first, prepare, chief, worker = done.stdout.splitlines()
    assert (0, "") == (done.returncode, done.stderr)
    assert first.startswith("MultiWorkerMirroredStrategy on 2 tasks")
    assert startup.data_command("prepare", "fashion_mnist") == prepare
    for line, task in ((chief, "chief"), (worker, "worker-0")):
        folders = f"RUN_DIR={tmp_path}/runs/one DATA_DIR={tmp_path}/data"
        assert line.startswith(f"{folders} TASK={task} CUDA_VISIBLE_DEVICES=-1 TF_CONFIG='{{")
        assert line.endswith(f" {shlex.quote(sys.executable)} -m cluster.agent &")
    assert not (tmp_path / "runs").exists()
    assert [] == supervisor.processes_left(RunFolder(tmp_path / "runs" / "one"))


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


@pytest.mark.parametrize("task", ["evaluate", "export", "predict"])
def test_what_only_the_trainer_saves_is_not_sought_in_a_script_s_run(make_run, task):
    run, c = make_run(workers=0), context()
    write_json(run.config, {"script": "fit.py", "arguments": []})
    image = {"image": "boot.png"} if task == "predict" else {}
    assert (EXIT_USAGE, []) == (refusal(task, c, run=run.name, trust=True, **image)[0], commands(c))


def test_a_saved_model_is_read_with_the_modules_and_packages_of_its_run(make_run, tmp_path, monkeypatch):
    run, c = make_run(workers=0), context()
    wanted = tmp_path / "mine.txt"
    monkeypatch.setattr(packages, "install_packages", lambda file, python: "/installed" if file == wanted else None)
    started = {"code_dirs": ["/my code"], "requirements": str(wanted)}
    write_json(run.control / "started.json", run.load_started().to_json() | started)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    tasks.ns["evaluate"](c, run=run.name, trust=True)
    (evaluates,) = map(shlex.split, commands(c))
    assert "PYTHONPATH=/my code:/installed:/theirs" == evaluates[0]
    assert ["-m", "train.saved_model", "evaluate"] == evaluates[2:5]


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
