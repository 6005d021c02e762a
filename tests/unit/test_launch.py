"""From a request to a started run: what is refused, with which exit code, and that nothing was started then."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import engine, launch, local, tensorboard
from cluster.errors import EXIT_PREREQUISITE, EXIT_USAGE, ClusterError, PrerequisiteError
from cluster.launch import Request
from cluster.runs import RunFolder, read_json, write_json

MakeRun = Callable[..., RunFolder]

CONFIG = {"preset": "fashion_mnist", "dataset": "fashion_mnist", "global_batch": 192}


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration, without the process that checks it."""
    monkeypatch.setattr(launch, "_resolve_config", lambda request, run: dict(CONFIG))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command in the place of those that build the images."""
    monkeypatch.setattr(launch, "image_commands", lambda: ["docker build ."])


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a `docker` with this script on the PATH, alone; returns the file that lists how it was called."""

    def put(script: str) -> Path:
        program, calls = tmp_path / "bin" / "docker", tmp_path / "docker-calls"
        program.parent.mkdir()
        calls.touch()
        program.write_text(f'#!/bin/sh\necho "$*" >>{calls}\n{script}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(program.parent))
        return calls

    return put


WORKING_ENGINE = 'case "$1" in info) echo \'"26.1.5"\';; compose) echo 2.26.1;; *) exit 1;; esac'


def refusal(asked: Request) -> ClusterError:
    """Return the error that a request is refused with; nothing may have been changed."""
    with pytest.raises(ClusterError) as refused:
        launch.plan(asked)
    assert 1 == len(str(refused.value).splitlines())
    return refused.value


# What cannot be done


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(workers="-1"), "--workers '-1': expected a whole number from 0 to 512"),
        (Request(workers="2.5"), "--workers '2.5': expected a whole number from 0 to 512"),
        (Request(workers="two"), "--workers 'two': expected a whole number from 0 to 512"),
        (Request(workers="10000"), "--workers '10000': expected a whole number from 0 to 512"),
        (Request(workers="0", ps="1"), "--ps 1 with --workers 0: parameter servers need workers"),
        (Request(strategy="mirored"), "--strategy 'mirored' is not a strategy; did you mean 'mirrored'?"),
        (Request(strategy="mirrored"), "--strategy mirrored cannot run on --workers 2"),
        (Request(runtime="podman"), "--runtime 'podman' is not a runtime; known: auto, docker, local"),
        (Request(runtime="dokcer"), "--runtime 'dokcer' is not a runtime; did you mean 'docker'?"),
        (Request(name="a/b"), "run name 'a/b': expected letters, digits"),
        (Request(name=".."), "run name '..': expected letters, digits"),
        (Request(tensorboard_port="http"), "--tensorboard-port 'http': expected a whole number from 0 to 65535"),
        (Request(tensorboard_port="65536"), "--tensorboard-port '65536': expected a whole number from 0 to 65535"),
        (Request(resume="absent"), "there is no run 'absent' in "),
        (Request(resume="a/b"), "run name 'a/b': expected letters, digits"),
        (Request(resume="one", name="two"), "--resume names its run: leave out --name and --fresh"),
        (Request(resume="one", fresh=True), "--resume names its run: leave out --name and --fresh"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(resolved: None, tmp_path: Path, request_: Request, told: str) -> None:
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert str(error).startswith(told)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(preset="fashion-mnst"), "--preset 'fashion-mnst' is not a preset; did you mean 'fashion_mnist'?"),
        (Request(overrides=("--epoch", "1")), "override '--epoch' is not an option of the training config; did you"),
        (Request(overrides=("--epochs", "-1")), "--epochs -1: expected a number above 0"),
        (Request(checkpoint_every="0"), "--checkpoint-every 0: expected a whole number from 1 to "),
        (
            Request(overrides=("--global-batch", "100")),
            "global_batch=100 is not divisible by 3 replicas; use 99 or 102: -- --global-batch 102",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path, request_: Request, told: str) -> None:
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert str(error).startswith(told)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_exists_is_not_overwritten_by_chance(resolved: None, make_run: MakeRun) -> None:
    make_run("taken")
    error = refusal(Request(name="taken"))
    told = "run 'taken' exists; go on with --resume taken, or start it again with --name taken --fresh"
    assert (EXIT_USAGE, told) == (error.exit_code, str(error))


def test_an_unknown_run_is_refused_with_the_nearest(resolved: None, make_run: MakeRun) -> None:
    make_run("monday")
    assert str(refusal(Request(resume="mondey"))).endswith("; did you mean 'monday'?")


def beat(run: RunFolder, task: str, state: str, age_s: float = 0) -> None:
    """Leave a heartbeat."""
    write_json(run.status(task), {"task": task, "state": state, "updated_at": time.time() - age_s})


@pytest.mark.parametrize("asked", [{"resume": "run"}, {"name": "run", "fresh": True}])
def test_a_run_in_progress_is_left_alone(resolved: None, make_run: MakeRun, asked: dict[str, Any]) -> None:
    beat(make_run(workers=1), "chief", "training")
    error = refusal(Request(**asked))
    assert (EXIT_USAGE, True) == (error.exit_code, str(error).startswith("run 'run' is still in progress; `invoke "))


def test_a_run_whose_tasks_all_fell_silent_can_be_resumed(resolved: None, make_run: MakeRun) -> None:
    run = make_run(workers=1)
    beat(run, "chief", "training", age_s=60)
    beat(run, "worker-0", "done", age_s=60)  # it had ended; the chief and the supervisor were killed
    assert launch.plan(Request(resume="run", runtime="local")).resumes


def test_a_run_of_which_one_task_lives_is_in_progress(make_run: MakeRun) -> None:
    run = make_run(workers=1)
    beat(run, "worker-0", "done", age_s=60)
    beat(run, "chief", "training")
    assert launch.in_progress(run)
    write_json(run.summary, {})
    assert not launch.in_progress(run)


# What the machine lacks


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "docker is not installed"),
        ("echo 'Cannot connect to the Docker daemon.' >&2; exit 1", "Cannot connect to the Docker daemon."),
        ("exec /bin/sleep 60", "docker info did not answer in 0.2 s"),
        ("exit 0", "no Docker Engine answers (no output)"),
        ("echo '\"\"'", "no Docker Engine answers"),
        ('[ "$1" = info ] && echo \'"26.1.5"\'', "Docker Engine 26.1.5 has no Compose plugin"),
    ],
)
def test_without_an_engine_runs_are_local_and_containers_are_refused(
    resolved: None,
    docker: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str | None,
    told: str,
) -> None:
    monkeypatch.setattr(engine.ask, "__kwdefaults__", {"timeout_s": 0.2 if script and "sleep" in script else 10})
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        docker(script)
    error = refusal(Request(runtime="docker"))
    assert EXIT_PREREQUISITE == error.exit_code
    assert told in str(error)
    assert str(error).endswith("or use --runtime local")
    planned = launch.plan(Request(runtime="auto"))
    assert "local" == planned.runtime
    assert told in planned.why_runtime


def test_with_an_engine_runs_are_containers(resolved: None, docker: Callable[[str], Path]) -> None:
    docker(WORKING_ENGINE)
    planned = launch.plan(Request())
    assert ("docker", "containers: Docker Engine 26.1.5, Compose 2.26.1") == (planned.runtime, planned.why_runtime)
    assert ["chief:2222", "worker-0:2222", "worker-1:2222"] == [task.address for task in planned.cluster.tasks]


class Commands(list[str]):
    """A shell that only remembers."""

    def __call__(self, command: str) -> None:
        self.append(command)


def start_refusal(request_: Request) -> ClusterError:
    """Return the error that ends the start of a run that could be planned; nothing may have been started."""
    planned, commands = launch.plan(request_), Commands()
    with pytest.raises(PrerequisiteError) as refused:
        launch.start(planned, commands, began=time.time())
    assert [] == commands
    assert not planned.run.path.exists()
    return refused.value


def test_a_port_in_use_ends_the_start(resolved: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = str(start_refusal(Request(runtime="local", tensorboard_port=str(port))))
    assert told.startswith(f"port 127.0.0.1:{port} is in use by another program")
    assert "--tensorboard-port" in told


def test_a_full_disk_ends_the_start(resolved: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
    told = str(start_refusal(Request(runtime="local", tensorboard_port="0")))
    assert told.startswith("100 MiB are free for ")
    assert "a run needs 512; free space" in told


def test_too_little_memory_ends_the_start(resolved: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TASK_MEMORY_BYTES", 2**60)
    assert "3 tasks need about" in str(start_refusal(Request(runtime="local", tensorboard_port="0")))


@pytest.mark.parametrize("folder", ["/proc/runs", "a file/runs"])
def test_a_runs_folder_that_cannot_be_made_ends_the_start(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / folder))
    told = str(start_refusal(Request(runtime="local", tensorboard_port="0")))
    assert told.startswith(f"runs folder {tmp_path / folder}: ")
    assert told.endswith("; set RUNS_DIR to one you own")


def test_a_run_folder_that_cannot_be_written_ends_the_start(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, started = Path.mkdir, []

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if "run" in path.parts:  # root may write anywhere, so the refusal is played
            raise PermissionError(13, "Permission denied")
        make(path, *arguments, **options)

    planned = launch.plan(Request(name="run", runtime="local", tensorboard_port="0"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(local, "start", started.append)
    with pytest.raises(PrerequisiteError, match=rf"run folder {tmp_path}/runs/run: Permission denied; .* RUNS_DIR"):
        launch.start(planned, Commands(), began=time.time())
    assert [] == started


# A start


def test_a_plan_changes_nothing(resolved: None, tmp_path: Path) -> None:
    planned = launch.plan(Request(name="one", runtime="local"))
    assert planned.run.path == tmp_path / "runs" / "one"
    assert not (tmp_path / "runs").exists()


def test_a_plan_as_json_shows_what_every_task_gets(resolved: None) -> None:
    value = launch.plan(Request(name="one", ps="1", evaluator=True, runtime="local")).to_json()
    assert ("one", "ParameterServerStrategy", 2, 192) == tuple(
        value[key] for key in ("run", "strategy", "replicas", "replica_batch")
    )
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task["task"] for task in value["tasks"]]
    for task in value["tasks"]:
        cluster = task["tf_config"]["cluster"]
        assert (["chief", "worker", "ps"], 4) == (list(cluster), sum(map(len, cluster.values())))
    assert "http://127.0.0.1:6006" == value["tensorboard"]


def test_the_replica_batch_is_the_global_batch_divided(resolved: None) -> None:
    value = launch.plan(Request(workers="1", devices="3", runtime="local")).to_json()
    assert (6, 32) == (value["replicas"], value["replica_batch"])


def test_a_local_start_prepares_data_and_leaves_the_whole_folder(
    resolved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, commands = [], Commands()
    monkeypatch.setattr(local, "start", started.append)
    planned = launch.plan(Request(name="one", workers="1", runtime="local", tensorboard_port="0"))
    launch.start(planned, commands, began=123.0)
    assert [launch.data_command("prepare", "fashion_mnist")] == commands
    assert [planned.run] == started
    assert (CONFIG, planned.cluster) == (read_json(planned.run.config), planned.run.load_cluster())
    assert 123.0 == read_json(planned.run.control / "started.json")["time"]
    assert planned.run == launch.find_run() == launch.find_run("one")


def test_a_container_start_builds_images_then_brings_up_every_task(
    resolved: None, built: None, docker: Callable[[str], Path]
) -> None:
    calls, commands = docker(WORKING_ENGINE), Commands()
    planned = launch.plan(Request(name="one", workers="1", tensorboard_port="0"))
    launch.start(planned, commands, began=time.time())
    assert commands == launch.commands(planned)
    assert launch.data_command("prepare", "fashion_mnist") == commands[0]
    assert "docker build ." == commands[1]
    assert commands[2].endswith("up --detach --no-build --pull never chief worker-0")
    assert f"-f {planned.run.compose}" in commands[2]
    asked = [call.split() for call in calls.read_text().splitlines()]
    assert [["info", "--format", "{{json", ".ServerVersion}}"], ["compose", "version", "--short"]] == asked


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_root_hands_the_run_folder_to_the_unprivileged_user(
    resolved: None, built: None, docker: Callable[[str], Path]
) -> None:
    docker(WORKING_ENGINE)
    planned = launch.plan(Request(name="one", workers="0", tensorboard_port="0"))
    launch.start(planned, Commands(), began=time.time())
    paths = [planned.run.path, *planned.run.path.rglob("*")]
    assert {(10001, 10001)} == {(path.stat().st_uid, path.stat().st_gid) for path in paths}


def test_a_fresh_start_deletes_the_old_folder(
    resolved: None, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    run = make_run("again", workers=0)
    run.event("chief", "first step")
    asked = Request(name="again", fresh=True, runtime="local", tensorboard_port="0")
    launch.start(launch.plan(asked), Commands(), began=time.time())
    assert ([], 0) == (run.events(), run.generation)


def test_a_resumed_run_keeps_its_history_in_a_new_generation(
    resolved: None, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    run = make_run("stopped", workers=2)
    run.event("chief", "checkpoint", step=200)
    beat(run, "chief", "stopped")
    run.end("stopped")
    write_json(run.summary, {"state": "stopped"})
    asked = Request(resume="stopped", runtime="local", tensorboard_port="0")
    launch.start(launch.plan(asked), Commands(), began=time.time())
    assert (1, 1, {}) == (len(run.events()), run.generation, run.heartbeats())
    assert (None, False) == (run.outcome, run.summary.exists())


# The end


@pytest.mark.parametrize(
    ("how", "expected"),
    [({"runtime": "local"}, []), ({"x-runtime": "docker"}, ["kill", "down --timeout 10 --volumes --remove-orphans"])],
)
def test_what_was_started_is_ended_by_its_own_engine(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, how: dict[str, str], expected: list[str]
) -> None:
    run, commands, killed = make_run(), Commands(), []
    write_json(run.compose, how)
    monkeypatch.setattr(local, "kill", killed.append)
    launch.kill(run, commands)
    launch.remove(run, commands)
    assert "stopped" == run.outcome["state"]
    assert expected == [command.partition(f"{run.compose} ")[2] for command in commands]
    assert killed == ([] if expected else [run, run])


def test_leftovers_are_the_runs_of_this_folder_that_live(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    left = make_run("left")
    make_run("ended")
    monkeypatch.setattr(local, "processes_left", lambda run: [1] if run == left else [])
    monkeypatch.setattr(engine, "ask", lambda *words: (1, "no engine"))
    assert [left] == launch.leftovers()


def test_no_current_run_is_told(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(ClusterError, match="there is no current run; start one with `invoke up`"):
        launch.find_run()
    run = make_run("gone")
    (tmp_path / "runs" / ".current").write_text("gone\n")
    assert run == launch.find_run()
    shutil.rmtree(run.path)
    with pytest.raises(ClusterError, match="there is no current run"):
        launch.find_run()


def test_our_own_tensorboard_does_not_count_as_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(tensorboard, "running", lambda runs_dir: port)
        tensorboard.check_port(tmp_path, port)
