"""From a request to a started run: what is refused, with which exit code, and that nothing was started then."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import EXIT_PREREQUISITE, EXIT_USAGE, ClusterError, PrerequisiteError
from cluster.image import build, engine, images
from cluster.launch import configuration, folders, planning, startup, teardown
from cluster.options import topology
from cluster.options.request import Request
from cluster.run import owner
from cluster.run.folder import RunFolder
from cluster.runtime import memory as limits
from cluster.runtime import tensorboard
from cluster.runtime.compose import overlay
from cluster.runtime.local import supervisor
from cluster.system.json_files import read_json, write_json
from tests.unit.launching import CONFIG, WORKING_ENGINE, Commands, refusal

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command in the place of those that build the images."""
    monkeypatch.setattr(build, "commands", lambda accelerator: ["docker build ."])
    monkeypatch.setattr(images, "inspect", lambda image: {"image": image, "id": "sha256:1"})


# What cannot be done


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(workers="-1"), ["--workers"]),
        (Request(workers="2.5"), ["--workers"]),
        (Request(workers="two"), ["--workers"]),
        (Request(workers="10000"), ["--workers"]),
        (Request(workers="0", ps="1"), ["--ps", "--workers"]),
        (Request(strategy="mirored"), ["--strategy", "'mirrored'"]),
        (Request(strategy="mirrored", workers="2"), ["--strategy", "--workers"]),
        (Request(loop="fitt"), ["--loop", "'fit'"]),
        (Request(strategy="tpu", runtime="docker"), ["--runtime", "--strategy"]),
        (Request(script="s.py", preset="mnist"), ["--preset"]),
        (Request(script="s.py", loop="fit", checkpoint_every="5"), ["--loop and --checkpoint-every"]),
        (Request(script="s.py", precision="bf16"), ["--precision"]),
        (Request(script="s.py", bitwise_elastic="2"), ["--bitwise-elastic"]),
        (Request(script="s.py", evaluator=True), ["--evaluator"]),
        (Request(separate_chief=True), ["--separate-chief", "--script"]),
        (Request(hang_timeout="0"), ["--hang-timeout"]),
        (Request(max_restarts="-1"), ["--max-restarts"]),
        (Request(script="absent.py"), ["--script 'absent.py'"]),
        (Request(script="/"), ["--script '/'"]),
        (Request(resume="one", script="s.py"), ["--script", "--resume"]),
        (Request(requirements="absent.txt"), ["--requirements"]),
        (Request(runtime="podman"), ["--runtime 'podman'"]),
        (Request(runtime="dokcer"), ["--runtime 'dokcer'", "'docker'"]),
        (Request(runtime="local", memory="8GiB"), ["--memory", "--runtime docker"]),
        (Request(gpu_runtime="cdi", nccl_debug="INFO"), ["--gpu-runtime and --nccl-debug", "--gpus"]),
        (Request(name="a/b"), ["'a/b'"]),
        (Request(name=".."), ["'..'"]),
        (Request(tensorboard_port="http"), ["--tensorboard-port"]),
        (Request(tensorboard_port="65536"), ["--tensorboard-port"]),
        (Request(resume="absent"), ["'absent'"]),
        (Request(resume="a/b"), ["'a/b'"]),
        (Request(resume="one", name="two", fresh=True), ["--name and --fresh", "--resume"]),
        (Request(trust=True), ["--trust", "--resume"]),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_: Request, named: list[str]
) -> None:
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert [] == [option for option in named if option not in str(error)], error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(preset="fashion-mnst"), "--preset 'fashion-mnst'"),
        (Request(overrides=("--epoch", "1")), "did you mean '--epochs'?"),
        (Request(overrides=("--epochs", "-1")), "--epochs -1"),
        (Request(checkpoint_every="30m"), "--checkpoint-every '30m'"),
        (Request(overrides=("--global-batch", "100")), "-- --global-batch 102"),
        (Request(bitwise_elastic="six"), "--bitwise-elastic six"),
        (Request(bitwise_elastic="2"), "--bitwise-elastic 2"),
        (Request(micro_batches="5"), "--micro-batches 5"),
        (Request(micro_batches="5", bitwise_elastic="6"), "--micro-batches 5"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path, request_: Request, named: str) -> None:
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert named in str(error)
    assert not (tmp_path / "runs").exists()


# What the machine lacks


def test_a_tpu_that_is_not_there_is_reported_before_anything_else(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(topology, "DEVICE_FILES", {"tpu": (f"{tmp_path}/accel*",)})
    error = refusal(Request(strategy="tpu", workers="2", ps="1"))
    assert EXIT_PREREQUISITE == error.exit_code
    assert str(error).startswith("--strategy tpu: ")
    assert "set TPU_NAME" in str(error)
    (tmp_path / "accel0").touch()
    planned = planning.plan(Request(strategy="tpu", devices="8"))
    assert ("local", "TPUStrategy", 8) == (
        planned.runtime.name,
        planned.cluster.strategy_class,
        planned.cluster.replicas,
    )


@pytest.mark.parametrize(
    ("script", "message"),
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
    message: str,
) -> None:
    monkeypatch.setattr(engine.ask, "__kwdefaults__", {"timeout_s": 0.2 if script and "sleep" in script else 10})
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        docker(script)
    error = refusal(Request(runtime="docker"))
    assert EXIT_PREREQUISITE == error.exit_code
    assert message in str(error)
    assert str(error).endswith("or use --runtime local")
    planned = planning.plan(Request(runtime="auto"))
    assert "local" == planned.runtime.name
    assert message in planned.why_runtime


def test_with_an_engine_runs_are_containers(resolved: None, docker: Callable[[str], Path]) -> None:
    docker(WORKING_ENGINE)
    planned = planning.plan(Request())
    assert ("docker", "containers: Docker Engine 26.1.5, Compose 2.26.1") == (planned.runtime.name, planned.why_runtime)
    assert ["chief:2222", "worker-0:2222", "worker-1:2222"] == [task.address for task in planned.cluster.tasks]


def start_refusal(request_: Request) -> ClusterError:
    """Return the error that ends the start of a run that could be planned; nothing may have been started."""
    planned, commands = planning.plan(request_), Commands()
    with pytest.raises(PrerequisiteError) as refused:
        startup.start(planned, commands, began=time.time())
    assert [] == commands
    assert not planned.run.path.exists()
    return refused.value


def test_a_port_in_use_ends_the_start(resolved: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = str(start_refusal(Request(runtime="local", tensorboard_port=str(port))))
    assert message.startswith(f"port 127.0.0.1:{port} is in use by another program")
    assert "--tensorboard-port" in message


def test_our_own_tensorboard_does_not_count_as_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(tensorboard, "running", lambda runs_dir: port)
        tensorboard.check_port(tmp_path, port)


def test_a_full_disk_ends_the_start(resolved: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
    message = str(start_refusal(Request(runtime="local", tensorboard_port="0")))
    assert message.startswith("100 MiB are free for ")
    assert "a run needs 512; free space" in message


def test_too_little_memory_ends_the_start(resolved: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASK_MEMORY_BYTES", 2**60)
    assert "3 tasks need about" in str(start_refusal(Request(runtime="local", tensorboard_port="0")))


@pytest.mark.parametrize("folder", ["/proc/runs", "a file/runs"])
def test_a_runs_folder_that_cannot_be_made_ends_the_start(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / folder))
    message = str(start_refusal(Request(runtime="local", tensorboard_port="0")))
    assert message.startswith(f"runs folder {tmp_path / folder}: ")
    assert message.endswith("; set RUNS_DIR to one you own")


def test_a_run_folder_that_cannot_be_written_ends_the_start(
    resolved: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, started = Path.mkdir, []

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if "run" in path.parts:  # root may write anywhere, so the refusal is played
            raise PermissionError(13, "Permission denied")
        make(path, *arguments, **options)

    planned = planning.plan(Request(name="run", runtime="local", tensorboard_port="0"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(supervisor, "start", started.append)
    with pytest.raises(PrerequisiteError, match=rf"run folder {tmp_path}/runs/run: Permission denied; .* RUNS_DIR"):
        startup.start(planned, Commands(), began=time.time())
    assert [] == started


# A plan


def test_a_plan_changes_nothing(resolved: None, tmp_path: Path) -> None:
    planned = planning.plan(Request(name="one", runtime="local"))
    assert planned.run.path == tmp_path / "runs" / "one"
    assert not (tmp_path / "runs").exists()


def test_a_plan_as_json_shows_what_every_task_gets(resolved: None) -> None:
    value = planning.plan(Request(name="one", ps="1", evaluator=True, runtime="local")).to_json()
    assert ("one", "ParameterServerStrategy", 2, 192) == tuple(
        value[key] for key in ("run", "strategy", "replicas", "replica_batch")
    )
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task["task"] for task in value["tasks"]]
    for task in value["tasks"]:
        cluster = task["tf_config"]["cluster"]
        assert (["chief", "worker", "ps"], 4) == (list(cluster), sum(map(len, cluster.values())))
    assert "http://127.0.0.1:6006" == value["tensorboard"]


def test_the_replica_batch_is_the_global_batch_divided(resolved: None) -> None:
    value = planning.plan(Request(workers="1", devices="3", runtime="local")).to_json()
    assert (6, 32) == (value["replicas"], value["replica_batch"])


def test_the_micro_batch_is_a_part_of_the_replica_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"micro_batches": 4}, (), ""))
    value = planning.plan(Request(workers="1", runtime="local")).to_json()
    assert (96, 4, 24) == (value["replica_batch"], value["micro_batches"], value["micro_batch"])


@pytest.mark.parametrize(("workers", "batch"), [("0", 192), ("2", 64), ("3", 64), ("5", 32)])
def test_of_virtual_shards_the_replica_batch_is_that_of_the_replica_with_most(
    monkeypatch: pytest.MonkeyPatch, workers: str, batch: int
) -> None:
    """6 shards of 32: of 4 replicas two have one and two have two."""
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"bitwise_elastic": 6}, (), ""))
    assert batch == planning.plan(Request(workers=workers, runtime="local")).to_json()["replica_batch"]


OPTIMIZER = {"name": "sgd", "learning_rate": 0.1, "warmup_steps": 50, "scaling": "linear", "base_batch": 48}
STATED = {
    "precision": "bf16",
    "optimizer": "sgd",
    "learning_rate": 0.4,
    "scaling": "linear",
    "base_learning_rate": 0.1,
    "base_batch": 48,
    "warmup_steps": 50,
    "schedule": "constant",
    "weight_decay": None,
    "ema": 0.0,
    "clip_norm": 1.5,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"precision": "bf16", "optimizer": OPTIMIZER | {"clip_norm": 1.5}}, {}),
        (
            {"precision": "bf16", "optimizer": OPTIMIZER | {"clip_norm": 1.5}, "callbacks": "tutorial"},
            {"warmup_steps": 0},
        ),
        (
            {"optimizer": {"name": "sgd", "learning_rate": 0.1, "warmup_steps": 50}},  # of a run from before these
            {"precision": "fp32", "learning_rate": 0.1, "scaling": "none", "base_batch": None, "clip_norm": 0.0},
        ),
    ],
)
def test_a_plan_states_what_the_numerics_come_to(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | config, (), ""))
    assert STATED | expected == planning.plan(Request(workers="2", runtime="local")).to_json()["training"]


def test_a_precision_that_the_strategy_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"precision": "fp16"}, (), ""))
    assert str(refusal(Request(ps="1", runtime="local"))).startswith("--precision fp16: ParameterServerStrategy has ")


@pytest.mark.parametrize("strategy", ["one", "mirrored", "central", "tpu"])
def test_strategies_of_one_process_have_no_workers_by_default(
    resolved: None, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    cluster = planning.plan(Request(strategy=strategy, runtime="local")).cluster
    assert (strategy, ["chief"]) == (cluster.strategy, [task.name for task in cluster.tasks])


def test_options_of_up_that_are_overrides_are_passed_on() -> None:
    requested = Request(loop="fit", precision="bf16", checkpoint_every="2.5s", overrides=("--epochs", "1"))
    expected = ["--loop", "fit", "--precision", "bf16", "--checkpoint-every", "2.5s", "--epochs", "1"]
    assert expected == requested.training()
    assert ["--epochs", "1"] == Request(overrides=("--epochs", "1")).training()


# A start


def test_a_local_start_prepares_data_and_leaves_the_whole_folder(
    resolved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, commands = [], Commands()
    monkeypatch.setattr(supervisor, "start", started.append)
    planned = planning.plan(Request(name="one", workers="1", runtime="local", tensorboard_port="0"))
    startup.start(planned, commands, began=123.0)
    assert [startup.data_command("prepare", "fashion_mnist")] == commands
    assert [planned.run] == started
    assert (CONFIG, planned.cluster) == (read_json(planned.run.config), planned.run.load_cluster())
    assert 123.0 == read_json(planned.run.control / "started.json")["time"]
    assert planned.run == folders.find_run() == folders.find_run("one")


def test_data_that_is_ready_is_not_prepared_and_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rerun --json` starts a run, too, and its output is read by a program."""
    monkeypatch.setattr(configuration, "resolve", lambda *_: (dict(CONFIG), (), "all of it"))
    monkeypatch.setattr(supervisor, "start", lambda run: None)
    commands = Commands()
    startup.start(
        planning.plan(Request(name="one", runtime="local", tensorboard_port="0")), commands, began=time.time()
    )
    assert ([], "") == (commands, capsys.readouterr().out)


def test_a_container_start_builds_images_then_brings_up_every_task(
    resolved: None, built: None, docker: Callable[[str], Path]
) -> None:
    calls, commands = docker(WORKING_ENGINE), Commands()
    planned = planning.plan(Request(name="one", workers="1", tensorboard_port="0"))
    startup.start(planned, commands, began=time.time())
    assert commands == startup.commands(planned)
    assert startup.data_command("prepare", "fashion_mnist") == commands[0]
    assert "docker build ." == commands[1]
    assert commands[2].endswith("up --detach --no-build --pull never chief worker-0")
    assert f"-f {planned.run.compose}" in commands[2]
    requested = [call.split() for call in calls.read_text().splitlines()]
    probed = [["info", "--format", "{{json", ".ServerVersion}}"], ["compose", "version", "--short"]]
    assert [*probed, ["info", "--format", "{{.MemTotal}}"]] == requested


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_root_hands_the_run_folder_to_the_unprivileged_user(
    resolved: None, built: None, docker: Callable[[str], Path]
) -> None:
    docker(WORKING_ENGINE)
    planned = planning.plan(Request(name="one", workers="0", tensorboard_port="0"))
    startup.start(planned, Commands(), began=time.time())
    paths = [planned.run.path, *planned.run.path.rglob("*")]
    assert {(10001, 10001)} == {(path.stat().st_uid, path.stat().st_gid) for path in paths}


# The end


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"runtime": "local"}, []),
        ({"x-runtime": "docker"}, [f"down --timeout {s} --volumes --remove-orphans" for s in (0, 10)]),
    ],
)
def test_what_was_started_is_ended_by_its_own_engine(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, how: dict[str, str], expected: list[str]
) -> None:
    run, commands, killed = make_run(), Commands(), []
    write_json(run.compose, how)
    monkeypatch.setattr(supervisor, "kill", killed.append)
    teardown.kill(run, commands)
    teardown.remove(run, commands)
    assert "stopped" == run.outcome["state"]
    assert expected == [command.partition(f" --project-name {overlay.project(run.path)} ")[2] for command in commands]
    assert killed == ([] if expected else [run, run])


def test_leftovers_are_the_runs_of_this_folder_that_live(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    left = make_run("left")
    make_run("ended")
    gone, contained = RunFolder(left.path.with_name("gone")), RunFolder(left.path.with_name("contained"))
    for run, runtime in ((left, "local"), (gone, "local"), (contained, "docker")):
        owner.begin(run, runtime)
    monkeypatch.setattr(supervisor, "processes_left", lambda run, table: [1] if run in (left, gone) else [])
    monkeypatch.setattr(engine, "ask", lambda *words: (1, "no engine"))
    found = teardown.leftovers(folders.runs_dir())
    assert ({"gone": ["local"], left.name: ["local"]}, ["contained"]) == (
        {name: [each.name for each in runtimes] for name, runtimes in found.found.items()},
        list(found.unreachable),
    )


def test_no_current_run_is_reported(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(ClusterError, match="there is no current run; start one with `invoke up`"):
        folders.find_run()
    run = make_run("gone")
    (tmp_path / "runs" / ".current").write_text("gone\n")
    assert run == folders.find_run()
    shutil.rmtree(run.path)
    with pytest.raises(ClusterError, match="there is no current run"):
        folders.find_run()
