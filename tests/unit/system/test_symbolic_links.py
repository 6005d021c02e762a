"""Links that a task leaves in its run's folder: commands and agents follow none out of it."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from invoke import Context, Exit

import tasks
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.host.launch import planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import compose_runtime
from cluster.host.runtime.local_runtime import ProcessFaults
from cluster.host.runtime.payload import Payload
from cluster.host.view.live import print_logs
from cluster.system import files, json_files
from tests.support.launching import Commands, workload


@pytest.fixture
def outside(tmp_path) -> Path:
    """A folder that is none of the run's business, with what reads and writes there would be seen by."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("chief.json", "chief.log", "7.json", "secret"):
        (folder / name).write_text('{"state": "done", "task": "chief", "updated_at": 0, "step": 0, "secret": 1}\n')
    return folder


@pytest.fixture
def untouched(outside) -> Callable[[], bool]:
    """Whether nothing has changed there."""
    seen = {path.name: path.read_text() for path in outside.iterdir()}
    return lambda: seen == {path.name: path.read_text() for path in outside.iterdir()}


def swap(path: Path, target: Path) -> None:
    """Put a link in the place of a file or a folder, as its owner can."""
    if os.path.lexists(path):
        path.rename(path.with_name(path.name + ".aside"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


READS = {
    "status/chief.json": lambda run: run.heartbeats(),
    "control/outcome.json": lambda run: run.outcome,
    "summary.json": lambda run: run.load_summary(),
    "events.jsonl": lambda run: run.events(),
    "metrics/chief.jsonl": lambda run: run.losses(),
    "logs/chief.log": lambda run: print_logs(run, ["chief"], follow=False),
    "checkpoints/secret": lambda run: files.sha256(run.checkpoints / "secret"),
}
NO_RECORDS = ("logs/chief.log", "checkpoints/secret")


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("at", READS)
def test_no_file_of_a_run_is_read_through_a_link(run, outside, at, folder, capsys, caplog):
    path = run.path / at
    if folder and path.parent != run.path:
        path.parent.rename(path.parent.with_name("aside"))
        path.parent.symlink_to(outside)
    else:
        swap(path, outside / "secret")
    for _ in range(2):
        if at in NO_RECORDS:
            with pytest.raises(files.LinkError) as refused:
                READS[at](run)
            assert folder or str(path) == refused.value.filename
        else:
            assert not READS[at](run)  # as where there is none
    assert folder or at in NO_RECORDS or 1 >= len(caplog.messages)  # it is said once
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.mkdir()])
@pytest.mark.parametrize("at", READS)
def test_a_special_file_is_not_waited_for(run, make, at):
    make(run.path / at)
    with pytest.raises(json_files.DamagedError):
        json_files.read_json(run.path / at)
    with pytest.raises(files.LinkError):
        files.open_file(run.path / at, "rb")


WRITES = {
    "control": lambda run: run.end("stopped"),
    "control/generations": lambda run: run.begin_generation(1),
    "status": lambda run: json_files.write_json(run.status("chief"), {}),
    "checkpoints": lambda run: files.remove(run.checkpoints / "secret"),
    "metrics": lambda run: json_files.append_json(run.metrics("chief"), {}),
    "logs": lambda run: files.open_file(run.log("chief"), "ab"),
    "work": lambda run: files.make_folder(run.work("chief")),
}


@pytest.mark.parametrize("folder", WRITES)
def test_nothing_is_written_through_a_folder_that_is_a_link(run, outside, untouched, folder):
    swap(run.path / folder, outside)
    with pytest.raises(files.LinkError):
        WRITES[folder](run)
    HeartbeatWriter(run, run.load_cluster().task("chief"), 0).write()
    assert untouched()


@pytest.mark.parametrize("mode", ["ab", "wb", "r+b"])
def test_no_file_is_written_through_a_link(run, outside, untouched, mode):
    swap(run.events_log, outside / "secret")
    with pytest.raises(files.LinkError):
        files.open_file(run.events_log, mode)
    run.event("chief", "noted")  # the writer continues
    swap(run.control / "reserve", outside / "secret")
    with pytest.raises(files.LinkError):
        files.open_file(run.control / "reserve", "wb")
    assert untouched()


def test_a_file_that_is_replaced_takes_the_place_of_a_link(run, outside, untouched):
    swap(run.summary, outside / "secret")
    json_files.write_json(run.summary, {"state": "failed"})
    assert {"state": "failed"} == json_files.read_json(run.summary)
    swap(run.control / "outcome.json", outside / "secret")
    assert run.end("failed")  # a link claims nothing
    assert "failed" == run.outcome.state
    assert untouched()


def test_a_run_may_itself_lie_behind_a_link_but_dots_lead_nowhere(run, tmp_path):
    for path in (run.path / "..", run.control / ".." / "config.json"):
        with pytest.raises(files.LinkError):
            files.open_file(path, "rb")
    (tmp_path / "named").symlink_to(run.path)
    RunFolder(tmp_path / "named").event("chief", "noted")
    assert ["noted"] == [event.event for event in run.events()]


@pytest.mark.parametrize(
    ("task", "part"),
    [("export", "export"), ("export", "checkpoints/ckpt-1.index"), ("export", "metrics"), ("logs", "logs/chief.log")],
)
def test_commands_use_nothing_with_links(run, outside, monkeypatch, capsys, task, part):
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    swap(run.path / part, outside / "secret" if task == "logs" else outside)
    with pytest.raises(Exit, match=part):
        tasks.ns[task](Context(), run=run.name)  # a context that would really run TensorFlow
    assert "" == capsys.readouterr().out


def test_corrupting_a_checkpoint_damages_no_other_file(run, outside, untouched):
    for name in (str(outside / "secret"), "../../../outside/secret", "link"):
        json_files.write_json(run.checkpoints / "ckpt-1.json", {"files": {name: {"size_bytes": 1, "sha256": ""}}})
        swap(run.checkpoints / "link", outside / "secret")
        with pytest.raises(OSError):
            ProcessFaults(run).corrupt("chief")
        (run.checkpoints / "link").unlink()
        assert untouched()


PARTS = ["status", "work", "work/chief", "control", "requirements.txt", "control/reserve"]


@pytest.mark.parametrize("part", PARTS)
def test_resuming_or_starting_over_touches_nothing_outside(outside, untouched, stopped_run, tmp_path, part):
    (packages := tmp_path / "packages").mkdir()
    (packages / "requirements.txt").touch()
    (script := tmp_path / "theirs" / "fit.py").parent.mkdir()
    script.touch()
    requested = {"script": str(script), "name": "one", "workers": 1}
    run = stopped_run(**requested)
    resumed = planning.plan(Request(resume="one", runtime="local", tensorboard_port="0"))
    resumed = dataclasses.replace(resumed, payload=dataclasses.replace(resumed.payload, packages=packages))
    is_file = part in ("requirements.txt", "control/reserve")
    swap(run.path / part, outside / "secret" if is_file else outside)
    with pytest.raises(files.LinkError):
        startup.start(resumed, Commands(), began=time.time())
    assert untouched()
    if part == "control":
        run.control.unlink()
        json_files.write_json(run.control / "outcome.json", {"state": "stopped", "time": 0})
    if not is_file:
        stopped_run(**requested, fresh=True)
        assert untouched()
        assert not (run.path / part).is_symlink()
        assert (run.work("chief") / "fit.py").is_symlink()  # our own, into the folder


def test_handing_over_a_folder_hands_over_no_more(make_run, outside, monkeypatch):
    run, handed = make_run(), []
    monkeypatch.setenv("RUNS_DIR", str(run.path.parent))
    (run.path / "to-folder").symlink_to(outside)
    (run.path / "to-file").symlink_to(outside / "secret")
    monkeypatch.setattr(os, "getuid", lambda: 0)

    def chown(name: str, uid: int, gid: int, *, dir_fd: int, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        handed.append(Path(f"/proc/self/fd/{dir_fd}").readlink() / name)

    monkeypatch.setattr(os, "chown", chown)
    compose_runtime.give_to_tasks(run.path)
    assert {run.path, *run.path.rglob("*")} <= {*handed}
    assert all(path.is_relative_to(run.path) for path in handed)


def test_a_script_s_tmp_is_mounted_from_where_no_task_can_put_a_link():
    work = workload(RunFolder(Path("/runs/one")), payload=Payload(Path("/theirs/train.py")))
    writable = {
        volume["source"]
        for task in compose_runtime.render_overlay(work)["services"].values()
        for volume in task["volumes"]
        if not volume.get("read_only")
    }
    # The engine, as root, follows a link on the way to what it mounts: none may lie in a folder that a task can change.
    assert {"/runs/one", "/runs/.scratch/one"} == writable
    assert not [one for one in writable for other in writable if one != other and Path(one).is_relative_to(other)]
