"""A plan: what every task gets, and what cannot be planned or started: with which exit code, and nothing started."""

import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.host.image import engine
from cluster.host.launch import configuration, plan, planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import resources as limits
from cluster.host.runtime import supervisor
from cluster.host.view.plan_view import plan_lines
from cluster.system.errors import EXIT_PREREQUISITE, PrerequisiteError
from tests.support.launching import CONFIG, Commands, refusal


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


@pytest.mark.parametrize(
    ("config", "topology", "expected"),
    [
        ({}, {"workers": 5}, {"replicas": 6, "replica_batch": 32}),
        ({"micro_batches": 4}, {"workers": 1}, {"replica_batch": 96, "micro_batches": 4, "micro_batch": 24}),
        # Of virtual shards it is that of the replica with most: of 4 replicas two have one of 6 and two have two.
        ({"bitwise_elastic": 6}, {"workers": 0}, {"replica_batch": 192}),
        ({"bitwise_elastic": 6}, {"workers": 3}, {"replica_batch": 64}),
        ({"bitwise_elastic": 6}, {"workers": 5}, {"replica_batch": 32}),
    ],
)
def test_the_global_batch_is_divided(monkeypatch, config, topology, expected):
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (CONFIG | config, (), ""))
    assert expected.items() <= planning.plan(Request(runtime="local", **topology)).to_json().items()


OPTIMIZER = {"name": "sgd", "learning_rate": 0.1, "warmup_steps": 50, "scaling": "linear", "base_batch": 48}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"precision": "bf16", "optimizer": OPTIMIZER | {"clip_norm": 1.5}},
            {
                "precision": "bf16",
                "learning_rate": 0.4,
                "base_learning_rate": 0.1,
                "warmup_steps": 50,
                "clip_norm": 1.5,
            },
        ),
        ({"optimizer": OPTIMIZER, "callbacks": "tutorial"}, {"learning_rate": 0.4, "warmup_steps": 0}),
        (
            {"optimizer": {"name": "sgd", "learning_rate": 0.1, "warmup_steps": 50}},  # of a run from before these
            {"precision": "fp32", "learning_rate": 0.1, "scaling": "none", "base_batch": None, "clip_norm": 0.0},
        ),
    ],
)
def test_a_plan_states_what_the_numerics_come_to(monkeypatch, config, expected):
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (CONFIG | config, (), ""))
    found = planning.plan(Request(workers=2, runtime="local")).to_json()["training"]
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("flags", "config", "faster"),
    [
        ("fpu avx512_bf16", {"onednn": "on"}, True),
        ("amx_bf16 fpu", {"onednn": "on"}, True),
        ("fpu avx2 avx512f", {"onednn": "on"}, False),
        ("avx512_bf16", {"onednn": "off"}, False),
        ("avx512_bf16", {"onednn": "on", "precision": "bf16"}, False),
    ],
)
def test_a_plan_says_where_bf16_is_faster(monkeypatch, tmp_path, flags, config, faster):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(plan, "computes_bf16", partial(plan.computes_bf16, tmp_path / "cpuinfo"))
    monkeypatch.setattr(
        configuration, "resolve_config", lambda *_: (CONFIG | {"optimizer": OPTIMIZER} | config, (), "")
    )
    value = planning.plan(Request(workers=2, runtime="local")).to_json()
    assert faster == value["training"]["bf16_is_faster"]
    assert faster == ("bf16 is faster" in " ".join(plan_lines(value)))


def test_a_precision_that_the_strategy_cannot_have_is_refused(monkeypatch):
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (CONFIG | {"precision": "fp16"}, (), ""))
    assert "--precision fp16" in str(refusal(Request(ps=1, runtime="local")))


@pytest.mark.parametrize("strategy", ["one", "mirrored", "central", "tpu"])
def test_strategies_of_one_process_have_no_workers_by_default(resolved, monkeypatch, strategy):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    cluster = planning.plan(Request(strategy=strategy, runtime="local")).cluster
    assert (strategy, ["chief"]) == (cluster.strategy, [task.name for task in cluster.tasks])


def test_options_of_up_that_are_overrides_are_passed_on():
    requested = Request(loop="fit", precision="bf16", checkpoint_every="2.5s", overrides=("--epochs", "1"))
    expected = ["--loop", "fit", "--precision", "bf16", "--checkpoint-every", "2.5s", "--epochs", "1"]
    assert expected == requested.training()
    staged = Request(micro_batches=8, schedule="1f1b", remat=True, cut="dense,logits")
    expected = ["--micro-batches 8", "--pipeline.schedule 1f1b", "--pipeline.cut dense,logits", "--pipeline.remat"]
    for words in expected:
        assert words in " ".join(staged.training())


def test_a_tpu_that_is_not_there_is_reported_before_anything_else(resolved, monkeypatch, tmp_path):
    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(planning, "DEVICE_FILES", {"tpu": (f"{tmp_path}/accel*",)})
    error = refusal(Request(strategy="tpu", workers=2, ps=1))
    assert EXIT_PREREQUISITE == error.exit_code
    assert "TPU_NAME" in str(error)
    (tmp_path / "accel0").touch()
    planned = planning.plan(Request(strategy="tpu", devices=8))
    assert ("local", 8) == (planned.runtime.name, planned.cluster.replicas)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "docker is not installed"),
        ("echo 'Cannot connect to the Docker daemon.' >&2; exit 1", "Cannot connect to the Docker daemon."),
        ("echo 'permission denied while trying to connect' >&2; exit 1", "permission denied"),
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
    assert ("usermod" in str(error)) is (message == "permission denied")
    planned = planning.plan(Request(runtime="auto"))
    assert "local" == planned.runtime.name
    assert message in planned.why_runtime


@pytest.mark.parametrize(
    "lack",
    [
        lambda m, there: m.setattr(startup.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20)),
        lambda m, there: m.setattr(limits, "TASK_MEMORY_BYTES", 2**60),
        lambda m, there: m.setenv("RUNS_DIR", "/proc/runs"),
        lambda m, there: m.setenv("RUNS_DIR", str(there / "a file" / "runs")),
    ],
    ids=["disk", "memory", "no folder", "no folder here"],
)
def test_what_a_run_needs_is_looked_for_before_anything_starts(resolved, monkeypatch, tmp_path, lack):
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port in use does not end the start
        request = Request(name="one", runtime="local", tensorboard_port=str(server.getsockname()[1]))
        startup.check_machine(planning.plan(request))
    (tmp_path / "a file").touch()
    lack(monkeypatch, tmp_path)
    planned, commands = planning.plan(request), Commands()
    with pytest.raises(PrerequisiteError):
        startup.start(planned, commands, began=time.time())
    assert [] == commands
    assert not planned.run.path.exists()


def test_a_run_folder_that_cannot_be_written_ends_the_start(resolved, monkeypatch, tmp_path):
    make, started = Path.mkdir, []

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if "run" in path.parts:  # root may write anywhere, so the refusal is played
            raise PermissionError(13, "Permission denied")
        make(path, *arguments, **options)

    planned = planning.plan(Request(name="run", runtime="local", tensorboard_port="0"))
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(supervisor, "start_supervisor", started.append)
    with pytest.raises(PrerequisiteError, match="RUNS_DIR"):
        startup.start(planned, Commands(), began=time.time())
    assert [] == started
