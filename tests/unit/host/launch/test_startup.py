"""A start and an end: what is run, what is left."""

import os
import shutil
import time

import pytest

from cluster.host.image import images
from cluster.host.launch import configuration, folders, planning, startup, teardown
from cluster.host.options.request import Request
from cluster.host.runtime import compose_services, mirror, supervisor
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.json_files import read_json, write_json
from tests.support.launching import CONFIG, WORKING_ENGINE, Commands, no_shell


@pytest.fixture
def built(monkeypatch):
    """One command in the place of those that build the images."""
    monkeypatch.setattr(images, "pending_commands", lambda accelerator: ["docker build ."])
    monkeypatch.setattr(images, "inspect_image", lambda image: {"image": image, "id": "sha256:1"})


def test_a_local_start_prepares_data_and_leaves_the_whole_folder(resolved, monkeypatch):
    started, commands = [], Commands()
    monkeypatch.setattr(supervisor, "start_supervisor", started.append)
    requested = {"name": "one", "workers": 1, "runtime": "local", "tensorboard_port": "0"}
    planned = planning.plan(Request(**requested, tag=("wide",), note="a first try"))
    startup.start(planned, commands, began=123.0)
    assert [startup.data_command("prepare", "fashion_mnist")] == commands
    assert [planned.run] == started
    assert (CONFIG, planned.cluster) == (read_json(planned.run.config), planned.run.load_cluster())
    started_as = planned.run.started
    assert (123.0, ("wide",), "a first try") == (started_as.time, started_as.tags, started_as.note)
    assert planned.run == folders.find_run() == folders.find_run("one")
    shutil.rmtree(planned.run.path)
    with pytest.raises(ClusterError):
        folders.find_run()


def test_a_mirror_is_tried_before_anything_starts_and_kept_by_a_resume(resolved, stopped_run, monkeypatch, tmp_path):
    uploaded, requested = [], {"runtime": "local", "tensorboard_port": "0"}
    monkeypatch.setattr(mirror, "start_upload", uploaded.append)
    refused = planning.plan(Request(name="none", mirror="file:///proc/store", **requested))
    with pytest.raises(PrerequisiteError):
        startup.start(refused, no_shell, began=123.0)
    assert not refused.run.path.exists()
    run = stopped_run(name="one", mirror=f"file://{tmp_path}/store")
    assert [run] == uploaded
    again = planning.plan(Request(resume="one", **requested))
    assert (run.started.mirror, run.started.mirror_id) == (again.mirror, again.mirror_id)
    assert (16, "") == (len(again.mirror_id), planning.plan(Request(resume="one", mirror="none", **requested)).mirror)


def test_data_that_is_ready_is_not_prepared_and_nothing_is_printed(monkeypatch, capsys):
    """`rerun --json` starts a run, too, and its output is read by a program."""
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (dict(CONFIG), (), "all of it"))
    monkeypatch.setattr(supervisor, "start_supervisor", lambda run: None)
    commands = Commands()
    startup.start(
        planning.plan(Request(name="one", runtime="local", tensorboard_port="0")), commands, began=time.time()
    )
    assert ([], "") == (commands, capsys.readouterr().out)


def test_a_container_start_builds_images_then_brings_up_every_task(resolved, built, docker):
    calls, commands = docker(WORKING_ENGINE), Commands()
    planned = planning.plan(Request(name="one", workers=1, tensorboard_port="0"))
    startup.start(planned, commands, began=time.time())
    assert commands == startup.list_commands(planned)
    assert startup.data_command("prepare", "fashion_mnist") == commands[0]
    assert "docker build ." == commands[1]
    assert commands[2].endswith("up --detach --no-build --pull never chief worker-0")
    assert f"-f {planned.run.compose}" in commands[2]
    assert {"info", "compose"} == {call.split()[0] for call in calls.read_text().splitlines()}  # it is only asked


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_root_hands_the_run_folder_to_the_unprivileged_user(resolved, built, docker):
    docker(WORKING_ENGINE)
    planned = planning.plan(Request(name="one", workers=0, tensorboard_port="0"))
    startup.start(planned, Commands(), began=time.time())
    paths = [planned.run.path, *planned.run.path.rglob("*")]
    assert {(10001, 10001)} == {(path.stat().st_uid, path.stat().st_gid) for path in paths}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"runtime": "local"}, []),
        ({"x-runtime": "docker"}, [f"down --timeout {s} --volumes --remove-orphans" for s in (0, 10)]),
    ],
)
def test_what_was_started_is_ended_by_its_own_engine(make_run, monkeypatch, how, expected):
    run, commands, killed = make_run(), Commands(), []
    write_json(run.compose, how)
    monkeypatch.setattr(supervisor, "kill_run", killed.append)
    teardown.remove_run(run, commands, grace_s=0)
    teardown.remove_run(run, commands)
    assert "stopped" == run.outcome.state
    assert expected == [
        command.partition(f" --project-name {compose_services.project(run.path)} ")[2] for command in commands
    ]
    assert killed == ([] if expected else [run, run])
