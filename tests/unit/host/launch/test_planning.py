"""A plan: what every task gets, and what cannot be planned or started: with which exit code, and nothing started."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.host.image import engine
from cluster.host.launch import configuration, planning, startup, topology
from cluster.host.options.request import Request
from cluster.host.runtime import resources as limits
from cluster.host.runtime import supervisor, tensorboard
from cluster.system.errors import EXIT_PREREQUISITE, ClusterError, PrerequisiteError
from tests.support.launching import CONFIG, WORKING_ENGINE, Commands, refusal


def test_a_plan_changes_nothing(resolved, tmp_path):
    planned = planning.plan(Request(name="one", runtime="local"))
    assert planned.run.path == tmp_path / "runs" / "one"
    assert not (tmp_path / "runs").exists()


def test_a_plan_as_json_shows_what_every_task_gets(resolved):
    value = planning.plan(Request(name="one", ps=1, evaluator=True, runtime="local")).to_json()
    assert ("one", "ParameterServerStrategy", 2, 192) == tuple(
        value[key] for key in ("run", "strategy", "replicas", "replica_batch")
    )
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task["task"] for task in value["tasks"]]
    for task in value["tasks"]:
        cluster = task["tf_config"]["cluster"]
        assert (["chief", "worker", "ps"], 4) == (list(cluster), sum(map(len, cluster.values())))
    assert "auto" == value["tensorboard"]


def test_the_replica_batch_is_the_global_batch_divided(resolved):
    value = planning.plan(Request(workers=1, devices=3, runtime="local")).to_json()
    assert (6, 32) == (value["replicas"], value["replica_batch"])


def test_the_micro_batch_is_a_part_of_the_replica_batch(monkeypatch):
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"micro_batches": 4}, (), ""))
    value = planning.plan(Request(workers=1, runtime="local")).to_json()
    assert (96, 4, 24) == (value["replica_batch"], value["micro_batches"], value["micro_batch"])


@pytest.mark.parametrize(("workers", "batch"), [(0, 192), (2, 64), (3, 64), (5, 32)])
def test_of_virtual_shards_the_replica_batch_is_that_of_the_replica_with_most(monkeypatch, workers, batch):
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
def test_a_plan_states_what_the_numerics_come_to(monkeypatch, config, expected):
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | config, (), ""))
    assert STATED | expected == planning.plan(Request(workers=2, runtime="local")).to_json()["training"]


def test_a_precision_that_the_strategy_cannot_have_is_refused(monkeypatch):
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"precision": "fp16"}, (), ""))
    assert str(refusal(Request(ps=1, runtime="local"))).startswith("--precision fp16: ParameterServerStrategy has ")


@pytest.mark.parametrize("strategy", ["one", "mirrored", "central", "tpu"])
def test_strategies_of_one_process_have_no_workers_by_default(resolved, monkeypatch, strategy):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    cluster = planning.plan(Request(strategy=strategy, runtime="local")).cluster
    assert (strategy, ["chief"]) == (cluster.strategy, [task.name for task in cluster.tasks])


def test_options_of_up_that_are_overrides_are_passed_on():
    requested = Request(loop="fit", precision="bf16", checkpoint_every="2.5s", overrides=("--epochs", "1"))
    expected = ["--loop", "fit", "--precision", "bf16", "--checkpoint-every", "2.5s", "--epochs", "1"]
    assert expected == requested.training()
    assert ["--epochs", "1"] == Request(overrides=("--epochs", "1")).training()


# What the machine lacks


def test_a_tpu_that_is_not_there_is_reported_before_anything_else(resolved, monkeypatch, tmp_path):
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(topology, "DEVICE_FILES", {"tpu": (f"{tmp_path}/accel*",)})
    error = refusal(Request(strategy="tpu", workers=2, ps=1))
    assert EXIT_PREREQUISITE == error.exit_code
    assert str(error).startswith("--strategy tpu: ")
    assert "set TPU_NAME" in str(error)
    (tmp_path / "accel0").touch()
    planned = planning.plan(Request(strategy="tpu", devices=8))
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
    resolved, docker, monkeypatch, tmp_path, script, message
):
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


def test_with_an_engine_runs_are_containers(resolved, docker):
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


def test_a_port_in_use_does_not_end_the_start(resolved):
    with socket.create_server(("127.0.0.1", 0)) as server:
        request = Request(runtime="local", tensorboard_port=str(server.getsockname()[1]))
        startup.check_machine(planning.plan(request))


def test_our_own_tensorboard_does_not_count_as_another_program(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(tensorboard, "running", lambda runs_dir: port)
        tensorboard.check_port(tmp_path, port)


def test_a_full_disk_ends_the_start(resolved, monkeypatch):
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
    message = str(start_refusal(Request(runtime="local", tensorboard_port="0")))
    assert message.startswith("100 MiB are free for ")
    assert "a run needs 512; free space" in message


def test_too_little_memory_ends_the_start(resolved, monkeypatch):
    monkeypatch.setattr(limits, "TASK_MEMORY_BYTES", 2**60)
    assert "3 tasks need about" in str(start_refusal(Request(runtime="local", tensorboard_port="0")))


@pytest.mark.parametrize("folder", ["/proc/runs", "a file/runs"])
def test_a_runs_folder_that_cannot_be_made_ends_the_start(resolved, monkeypatch, tmp_path, folder):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / folder))
    message = str(start_refusal(Request(runtime="local", tensorboard_port="0")))
    assert message.startswith(f"runs folder {tmp_path / folder}: ")
    assert message.endswith("; set RUNS_DIR to one you own")


def test_a_run_folder_that_cannot_be_written_ends_the_start(resolved, monkeypatch, tmp_path):
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
