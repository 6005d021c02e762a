"""Runs from elsewhere, and runs whose tasks rewrote the records: nothing of them is started without --trust."""

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import tasks
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning, startup, teardown
from cluster.host.options.request import Request
from cluster.host.runtime import compose_runtime
from cluster.system.errors import EXIT_USAGE, ClusterError, PrerequisiteError, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support import command_line
from tests.support.launching import WORKING_ENGINE, Commands, refusal


def another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have another user's, or another machine's, notes from now on."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path.with_name(f"{tmp_path.name}-another")))


@pytest.fixture
def started(resolved, stopped_run) -> Callable[..., RunFolder]:
    """Starts a run of local processes, up to the processes themselves, and ends it; returns its folder."""
    return lambda **requested: stopped_run(
        **({} if "resume" in requested else {"name": "mine", "workers": 1}) | requested
    )


def test_a_run_that_was_started_here_is_gone_on_with_again_and_again(started):
    run = started()
    for _ in range(2):
        provenance.check_trusted(run)
        started(resume="mine", workers=2)
    # What the tasks write is not covered.
    write_json(run.manifest, read_json(run.manifest) | {"data": {"name": "x"}, "environment": {"python": "3"}})
    write_json(run.checkpoints / "ckpt-1.json", {"step": 1, "files": {}})
    provenance.check_trusted(run)


@pytest.mark.parametrize(
    "record", ["config.json", "cluster.json", "compose.json", "control/started.json", "manifest.json"]
)
def test_a_record_that_was_rewritten_is_named_and_not_believed(started, record):
    run = started()
    write_json(run.path / record, read_json(run.path / record) | {"preset": "theirs:preset"})
    error = refusal(Request(resume="mine", runtime="local"))
    assert (EXIT_USAGE, True, True) == (error.exit_code, record in str(error), "--trust" in str(error))
    for text in ("{", "[]", None):
        (run.path / record).write_text(text) if text else (run.path / record).unlink()
        with pytest.raises(UsageError):
            provenance.check_trusted(run)


def test_a_run_of_another_user_or_machine_is_refused_unless_it_was_moved(started, monkeypatch, tmp_path):
    started().path.parent.rename(tmp_path / "moved")
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "moved"))
    assert planning.plan(Request(resume="mine", runtime="local")).resumes
    theirs = RunFolder(tmp_path / "moved" / "theirs")
    shutil.copytree(tmp_path / "moved" / "mine", theirs.path)
    with pytest.raises(UsageError, match="--trust"):
        provenance.check_trusted(theirs)
    another_user(monkeypatch, tmp_path)
    assert "--trust" in str(refusal(Request(resume="mine", runtime="local")))
    assert "--trust" in str(refusal(Request(trust=True)))  # which is for runs that are there


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", "[{}]", "null", "[[]]", '[{"config.json": 1}]'])
def test_a_note_that_is_none_trusts_nothing(run, text):
    provenance._path(run.name).write_text(text)
    with pytest.raises(UsageError):
        provenance.check_trusted(run)


COMMANDS = {
    "up": {"resume": "mine"},
    "plan": {"resume": "mine"},
    "rerun": {"run": "mine"},
    "scale": {"run": "mine", "workers": 2},
    "evaluate": {"run": "mine"},
    "export": {"run": "mine"},
    "predict": {"run": "mine", "image": "boot.png"},
}


@pytest.fixture
def ready(started, make_run, monkeypatch) -> Callable[[str], RunFolder]:
    """Makes a run on which a command does something; starting something raises an error."""
    begin = Mock(side_effect=ClusterError("it was begun"))

    def make(command: str) -> RunFolder:
        run = started()
        monkeypatch.setattr(startup, "start", begin)
        monkeypatch.setattr(startup, "check_machine", begin)
        monkeypatch.setattr(tasks, "plan_lines", begin)
        if command == "rerun":
            write_json(run.summary, {"state": "succeeded"})
        if command == "scale":
            run.reopen()
            write_json(run.status("chief"), {"task": "chief", "state": "training", "updated_at": time.time()})
        return run

    return make


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_starts_or_loads_anything_of_a_run_that_is_not_trusted(ready, command):
    def ending(**more: Any) -> str:
        c = command_line.context()
        c.run.side_effect = ClusterError("it was begun")
        return command_line.refusal(command, c, **COMMANDS[command], **more)[1]

    run = ready(command)
    assert "error: it was begun" == ending()
    started_json = run.control / "started.json"
    write_json(started_json, read_json(started_json) | {"theirs": 1})
    assert ending().startswith("error: run 'mine': control/started.json changed since you started it, ")
    assert "error: it was begun" == ending(trust=True)


def test_what_is_trusted_and_gone_on_with_is_known_from_then_on(started, monkeypatch, tmp_path):
    run = started()
    assert 0o700 == provenance._path(run.name).parent.stat().st_mode & 0o777
    another_user(monkeypatch, tmp_path)
    started(resume="mine", trust=True)
    provenance.check_trusted(run)


def test_a_run_is_scaled_only_if_its_tasks_left_its_records_alone(started, monkeypatch):
    run = started()
    planned = planning.plan(Request(resume="mine", runtime="local", tensorboard_port="0"))
    write_json(run.config, read_json(run.config) | {"preset": "theirs:preset"})  # before the last of them ended
    before = read_json(provenance._path(run.name))
    with pytest.raises(UsageError, match="config.json"):
        startup.continue_run(planned, Commands())
    assert (before, 0) == (read_json(provenance._path(run.name)), run.generation)


def test_ending_a_run_obeys_nothing_that_its_tasks_can_write(make_run):
    run, commands = make_run("one"), Commands()
    hook = {"command": ["id"], "user": "root", "privileged": True}  # which Compose obeys before it stops a container
    theirs = {"name": "another", "include": ["/etc/passwd"], "services": {"chief": {"pre_stop": [hook]}}}
    write_json(run.compose, {"x-runtime": "docker"} | theirs)
    teardown.remove_run(run, commands, grace_s=0)
    (words,) = [shlex.split(command) for command in commands]
    assert ["docker", "compose", "--progress=quiet", "--project-name", compose_runtime.project(run.path)] == words[:5]
    assert ["down", "--timeout", "0", "--volumes", "--remove-orphans"] == words[5:]
    assert "stopped" == run.outcome.state


def test_notes_are_with_the_user_s_state(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert tmp_path / ".local" / "state" / "tf-cluster" / "runs" / "a.json" == provenance._path("a")


def test_a_folder_of_notes_that_is_another_s_is_refused(started, monkeypatch):
    run = started()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PrerequisiteError):
        provenance.create_folder()
    with pytest.raises(UsageError):
        provenance.check_trusted(run)


def test_a_name_has_a_bounded_number_of_notes(run):
    for seed in range(provenance.NOTES + 5):
        write_json(run.config, {"seed": seed})
        provenance.write_note(run)
    assert provenance.NOTES == len(read_json(provenance._path(run.name)))
    provenance.check_trusted(run)


def test_where_nothing_can_be_noted_nothing_is_started(resolved, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    planned = planning.plan(Request(name="one", runtime="local", tensorboard_port="0"))
    with pytest.raises(PrerequisiteError):
        startup.start(planned, Commands(), began=time.time())
    assert not planned.run.path.exists()


@pytest.mark.parametrize("seen", ["RUNS_DIR", "DATA_DIR", "script"])
def test_no_container_sees_the_notes(resolved, docker, monkeypatch, tmp_path, seen):
    docker(WORKING_ENGINE)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", "/nowhere")  # where no script may lie anyway
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for folder in (tmp_path, home):
        folder.chmod(0o755)
    requested = {"name": "one", "workers": 0}
    if seen == "script":
        (home / "fit.py").touch(mode=0o644)
        requested["script"] = str(home / "fit.py")
    else:
        monkeypatch.setenv(seen, str(home))
    error = refusal(Request(**requested))
    assert (EXIT_USAGE, True) == (error.exit_code, f"{home}/state/tf-cluster/runs" in str(error))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    planning.plan(Request(**requested))


def test_a_resume_that_was_killed_while_it_wrote_the_records_can_be_tried_again(started, monkeypatch):
    run = started()
    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(provenance, "write_note", Mock(side_effect=SystemExit))
        started(resume="mine", workers=2)
    assert 3 == len(run.load_cluster().tasks)
    copy = run.path.with_name("copy")
    shutil.copytree(run.path, copy)
    provenance.check_trusted(run)
    shutil.move(run.path, run.path.with_name("moved"))
    shutil.move(copy, run.path)
    with pytest.raises(UsageError):  # it is another folder
        provenance.check_trusted(run)
