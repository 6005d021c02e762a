"""From a request to a started run: what is refused, with which exit code, and that nothing was started then."""

from __future__ import annotations

import dataclasses
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

from cluster import configuration, engine, images, launch, local, payload, request, startup, teardown, tensorboard
from cluster.errors import EXIT_PREREQUISITE, EXIT_USAGE, ClusterError, PrerequisiteError, UsageError
from cluster.files import read_json, write_json
from cluster.request import Request
from cluster.runs import RunFolder
from cluster.spec import Role

MakeRun = Callable[..., RunFolder]

CONFIG = {"preset": "fashion_mnist", "dataset": "fashion_mnist", "global_batch": 192}


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration, without the process that checks it."""
    monkeypatch.setattr(configuration, "resolve", lambda request, base, packages: (dict(CONFIG), ()))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command in the place of those that build the images."""
    monkeypatch.setattr(startup, "image_commands", lambda: ["docker build ."])
    monkeypatch.setattr(images, "inspect", lambda image: {"image": image, "id": "sha256:1"})


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
        (Request(strategy="mirrored", workers="2"), "--strategy mirrored cannot run on --workers 2"),
        (Request(loop="fitt"), "--loop 'fitt' is not a loop; did you mean 'fit'?"),
        (Request(strategy="tpu", runtime="docker"), "--runtime docker with --strategy tpu: containers get no TPU"),
        (Request(script="s.py", preset="mnist"), "--preset with a script: they are the built-in trainer's"),
        (Request(script="s.py", loop="fit", checkpoint_every="5"), "--loop and --checkpoint-every with a script"),
        (Request(script="s.py", evaluator=True), "--evaluator with a script: "),
        (Request(chief_as_worker=True), "--chief-as-worker is for scripts"),
        (Request(hang_timeout="0"), "--hang-timeout '0': expected a whole number from 1 to 86400"),
        (Request(script="absent.py"), "--script 'absent.py' does not exist: expected a Python file"),
        (Request(script="/"), "--script '/' is a folder: expected a Python file"),
        (Request(script="/.profile"), "--script '/.profile' lies in the root of the file system, and tasks see all of"),
        (Request(resume="one", script="s.py"), "--resume goes on with what its run was started with: leave out --scr"),
        (Request(requirements="absent.txt"), "--requirements "),
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
def test_a_request_that_makes_no_sense_is_refused(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_: Request, told: str
) -> None:
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    if request_.script == "/.profile":
        monkeypatch.setattr(Path, "is_file", lambda path: True)
        monkeypatch.setattr(payload.os, "access", lambda path, mode: True)
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert str(error).startswith(told)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(preset="fashion-mnst"), "--preset 'fashion-mnst' is neither built in nor of the form"),
        (Request(overrides=("--epoch", "1")), "override '--epoch' is not an option of the training config; did you"),
        (Request(overrides=("--epochs", "-1")), "--epochs -1: expected a number above 0"),
        (Request(checkpoint_every="0"), "--checkpoint-every 0: expected a whole number from 1 to "),
        (Request(checkpoint_every="0.05s"), "--checkpoint-seconds 0.05: expected 0, or a number of at least 0.1"),
        (
            Request(checkpoint_every="30m"),
            "--checkpoint-every '30m': expected optimizer steps such as 200, or seconds such as 30s",
        ),
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
    assert teardown.in_progress(run)
    write_json(run.summary, {})
    assert not teardown.in_progress(run)


def topology(run: RunFolder, **asked: Any) -> tuple[str, int, int, int]:
    """Return strategy, workers, parameter servers and devices of a resumed run."""
    cluster = launch.plan(Request(resume=run.name, runtime="local", **asked)).cluster
    return cluster.strategy, len(cluster.of(Role.WORKER)), len(cluster.of(Role.PS)), cluster.devices


@pytest.mark.parametrize(
    ("had", "asked", "expected"),
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
def test_a_resumed_run_keeps_its_topology_unless_another_is_given(
    resolved: None, make_run: MakeRun, had: dict[str, Any], asked: dict[str, str], expected: tuple[str, int, int, int]
) -> None:
    run = make_run(**had)
    run.end("stopped")
    write_json(run.summary, {"state": "stopped"})
    assert expected == topology(run, **asked)


def test_a_resumed_run_keeps_its_evaluator(resolved: None, make_run: MakeRun) -> None:
    run = make_run(workers=0, evaluator=True)
    write_json(run.summary, {"state": "stopped"})
    assert launch.plan(Request(resume=run.name, runtime="local")).cluster.of(Role.EVALUATOR)


@pytest.mark.parametrize("strategy", ["one", "mirrored", "central", "tpu"])
def test_strategies_of_one_process_have_no_workers_by_default(
    resolved: None, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    cluster = launch.plan(Request(strategy=strategy, runtime="local")).cluster
    assert (strategy, ["chief"]) == (cluster.strategy, [task.name for task in cluster.tasks])


# What the machine lacks


def test_a_tpu_that_is_not_there_is_told_before_anything_else(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(request, "DEVICE_FILES", (f"{tmp_path}/accel*",))
    error = refusal(Request(strategy="tpu", workers="2", ps="1"))
    assert EXIT_PREREQUISITE == error.exit_code
    assert str(error).startswith("--strategy tpu: this machine has no TPU (no /dev/accel* and no /dev/vfio); ")
    assert "set TPU_NAME" in str(error)
    (tmp_path / "accel0").touch()
    planned = launch.plan(Request(strategy="tpu", devices="8"))
    assert ("local", "TPUStrategy", 8) == (planned.runtime, planned.cluster.strategy_class, planned.cluster.replicas)


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
        startup.start(planned, commands, began=time.time())
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
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
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
        startup.start(planned, Commands(), began=time.time())
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
    startup.start(planned, commands, began=123.0)
    assert [startup.data_command("prepare", "fashion_mnist")] == commands
    assert [planned.run] == started
    assert (CONFIG, planned.cluster) == (read_json(planned.run.config), planned.run.load_cluster())
    assert 123.0 == read_json(planned.run.control / "started.json")["time"]
    assert planned.run == launch.find_run() == launch.find_run("one")


# One's own code


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Somebody's script, in a folder that everybody may read."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "fit.py").touch()
    (folder / "table.csv").touch()
    return folder / "fit.py"


def test_a_script_may_ask_for_its_chief_as_worker_0(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    options = {"runtime": "local", "tensorboard_port": "0"}
    planned = launch.plan(Request(script=str(theirs), workers="1", chief_as_worker=True, name="led", **options))
    startup.start(planned, Commands(), began=time.time())
    planned.run.end("stopped")
    write_json(planned.run.summary, {"state": "stopped"})
    for plan in (planned, launch.plan(Request(resume="led", **options))):
        tasks = plan.compose["tasks"].values()
        assert ["1", "1"] == [task["environment"]["CHIEF_AS_WORKER"] for task in tasks]


def test_a_script_needs_no_data_and_gets_a_folder_to_work_in(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    commands = Commands()
    asked = Request(script=str(theirs), workers="1", runtime="local", tensorboard_port="0", overrides=("-n", "a b"))
    planned = launch.plan(asked)
    assert planned.run.name.startswith("fit-")
    (note,) = planned.notes
    assert note.startswith("tf.keras is Keras 2 (tf_keras) for the script, ")
    startup.start(planned, commands, began=time.time())
    assert [] == commands
    expected = {"script": str(theirs), "arguments": ["-n", "a b"], "chief_as_worker": False}
    assert expected == planned.run.script == read_json(planned.run.config)
    assert (tmp_path / "data").is_dir()
    assert theirs.parent / "table.csv" == (planned.run.work("worker-0") / "table.csv").readlink()
    for task in read_json(planned.run.compose)["tasks"].values():
        assert ["-m", "cluster.agent", "--script", str(theirs), "-n", "a b"] == task["command"][1:]
    value = planned.to_json()
    assert (None, None) == (value["global_batch"], value["replica_batch"])


def test_a_script_s_run_goes_on_with_its_script(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    asked = Request(script=str(theirs), name="one", workers="1", runtime="local", tensorboard_port="0")
    startup.start(launch.plan(dataclasses.replace(asked, overrides=("7",))), Commands(), began=time.time())
    run = launch.find_run("one")
    run.end("stopped")
    write_json(run.summary, {"state": "stopped"})
    resumed = launch.plan(Request(resume="one", runtime="local"))
    assert (theirs, ("7",), 2) == (resumed.payload.script, resumed.payload.arguments, len(resumed.cluster.tasks))
    assert ("8",) == launch.plan(Request(resume="one", runtime="local", overrides=("8",))).payload.arguments
    assert str(refusal(Request(resume="one", preset="mnist"))).startswith("--preset with a script: ")
    startup.start(resumed, Commands(), began=time.time())
    assert 1 == run.generation


def test_a_script_in_containers_is_mounted(theirs: Path, docker: Callable[[str], Path]) -> None:
    docker(WORKING_ENGINE)
    task = launch.plan(Request(script=str(theirs), workers="1")).compose["services"]["worker-0"]
    assert ["--script", "/script/fit.py"] == task["command"]
    assert {"type": "bind", "source": str(theirs.parent), "target": "/script", "read_only": True} in task["volumes"]
    assert ["cluster", "egress"] == task["networks"]


def test_modules_of_one_s_own_are_mounted_and_on_the_path(
    docker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(configuration, "resolve", lambda request, base, packages: (dict(CONFIG), (tmp_path / "mine",)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    asked = Request(preset="mine.presets:small", workers="1", runtime="local")
    planned = launch.plan(asked)
    assert planned.run.name.startswith("mine.presets-small-")
    path = f"{tmp_path}/mine"
    assert path == planned.compose["tasks"]["chief"]["environment"]["PYTHONPATH"]
    assert startup.commands(planned)[0].startswith(f"PYTHONPATH={path} {startup.sys.executable} -m train.data prepare ")
    docker(WORKING_ENGINE)
    task = launch.plan(Request(preset="mine.presets:small", workers="1")).compose["services"]["chief"]
    assert "/code/0" == task["environment"]["PYTHONPATH"]
    assert {"type": "bind", "source": f"{tmp_path}/mine", "target": "/code/0", "read_only": True} in task["volumes"]
    assert "networks" not in task


def test_the_caller_s_modules_are_found_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, name in ((here, "presets_here"), (there, "presets_there")):
        folder.mkdir()
        text = "from train.config import TrainConfig\n\n\ndef small():\n    return TrainConfig(global_batch=6)\n"
        (folder / f"{name}.py").write_text(text)
        (folder / "train.py").write_text("raise SystemExit('this is not the training program')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", "../there")
    for folder, name in ((here, "presets_here"), (there, "presets_there")):
        planned = launch.plan(Request(preset=f"{name}:small", runtime="local"))
        assert (6, (folder,)) == (planned.config["global_batch"], planned.payload.code_dirs)


def test_extra_packages_are_got_before_anything_is_started(
    resolved: None, theirs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, docker: Callable[[str], Path]
) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    asked = []

    def prepare(requirements: Path, python: str) -> Path:
        asked.append((requirements, python))
        (tmp_path / "kept").mkdir(exist_ok=True)
        (tmp_path / "kept" / "requirements.txt").write_text("resolved\n")
        return tmp_path / "kept"

    monkeypatch.setattr(launch.packages, "prepare", prepare)
    (tmp_path / "r.txt").touch()
    for options in ({"script": str(theirs)}, {}):
        planned = launch.plan(Request(**options, requirements=str(tmp_path / "r.txt"), runtime="local", workers="0"))
        assert str(tmp_path / "kept") == planned.compose["tasks"]["chief"]["environment"]["PYTHONPATH"]
    startup.start(planned, Commands(), began=time.time())
    assert "resolved\n" == (planned.run.path / "requirements.txt").read_text()
    write_json(planned.run.summary, {"state": "stopped"})
    assert tmp_path / "kept" == launch.plan(Request(resume=planned.run.name, runtime="local")).payload.packages
    assert {(tmp_path / "r.txt", launch.packages.host_python())} == set(asked)
    docker(WORKING_ENGINE)
    launch.plan(Request(script=str(theirs), requirements=str(tmp_path / "r.txt")))
    assert (tmp_path / "r.txt", "3.11") == asked[-1]


def test_options_of_up_that_are_overrides_are_passed_on() -> None:
    asked = Request(loop="fit", checkpoint_every="2.5s", overrides=("--epochs", "1"))
    assert ["--loop", "fit", "--checkpoint-seconds", "2.5", "--epochs", "1"] == asked.training()
    assert ["--epochs", "1"] == Request(overrides=("--epochs", "1")).training()


def test_a_resumed_run_can_go_from_checkpoints_by_seconds_to_steps_and_back() -> None:
    assert ["--checkpoint-seconds", "30"] == Request(checkpoint_every="30s").training()
    assert ["--checkpoint-every", "200", "--checkpoint-seconds", "0"] == Request(checkpoint_every="200").training()


@pytest.mark.parametrize("value", ["30m", "abc", "s", "-5", "-5s", "0s", "0.0s", ".5s", "2.5", "30 s", "1e3s", "infs"])
def test_checkpoints_every_what_is_neither_steps_nor_seconds_are_refused(value: str) -> None:
    with pytest.raises(UsageError) as refused:
        Request(checkpoint_every=value).training()
    told = f"--checkpoint-every {value!r}: expected optimizer steps such as 200, or seconds such as 30s"
    assert told == str(refused.value)


def test_a_container_start_builds_images_then_brings_up_every_task(
    resolved: None, built: None, docker: Callable[[str], Path]
) -> None:
    calls, commands = docker(WORKING_ENGINE), Commands()
    planned = launch.plan(Request(name="one", workers="1", tensorboard_port="0"))
    startup.start(planned, commands, began=time.time())
    assert commands == startup.commands(planned)
    assert startup.data_command("prepare", "fashion_mnist") == commands[0]
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
    startup.start(planned, Commands(), began=time.time())
    paths = [planned.run.path, *planned.run.path.rglob("*")]
    assert {(10001, 10001)} == {(path.stat().st_uid, path.stat().st_gid) for path in paths}


def test_a_fresh_start_deletes_the_old_folder(
    resolved: None, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "start", lambda run: None)
    run = make_run("again", workers=0)
    run.event("chief", "first step")
    asked = Request(name="again", fresh=True, runtime="local", tensorboard_port="0")
    startup.start(launch.plan(asked), Commands(), began=time.time())
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
    startup.start(launch.plan(asked), Commands(), began=time.time())
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
    teardown.kill(run, commands)
    teardown.remove(run, commands)
    assert "stopped" == run.outcome["state"]
    assert expected == [command.partition(f"{run.compose} ")[2] for command in commands]
    assert killed == ([] if expected else [run, run])


def test_leftovers_are_the_runs_of_this_folder_that_live(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    left = make_run("left")
    make_run("ended")
    monkeypatch.setattr(local, "processes_left", lambda run: [1] if run == left else [])
    monkeypatch.setattr(engine, "ask", lambda *words: (1, "no engine"))
    assert [left] == teardown.leftovers(launch.runs_dir())


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
