"""A plan: what every task gets, and what the numerics come to."""

import pytest

from cluster.host.launch import configuration, planning
from cluster.host.options.request import Request
from tests.support.launching import CONFIG, refusal


def test_a_plan_changes_nothing(resolved, tmp_path):
    planned = planning.plan(Request(name="one", runtime="local"))
    assert planned.run.path == tmp_path / "runs" / "one"
    assert not (tmp_path / "runs").exists()


def test_a_plan_as_json_shows_what_every_task_gets(resolved):
    value = planning.plan(Request(name="one", ps="1", evaluator=True, runtime="local")).to_json()
    assert ("one", "ParameterServerStrategy", 2, 192) == tuple(
        value[key] for key in ("run", "strategy", "replicas", "replica_batch")
    )
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task["task"] for task in value["tasks"]]
    for task in value["tasks"]:
        cluster = task["tf_config"]["cluster"]
        assert (["chief", "worker", "ps"], 4) == (list(cluster), sum(map(len, cluster.values())))
    assert "auto" == value["tensorboard"]


def test_the_replica_batch_is_the_global_batch_divided(resolved):
    value = planning.plan(Request(workers="1", devices="3", runtime="local")).to_json()
    assert (6, 32) == (value["replicas"], value["replica_batch"])


def test_the_micro_batch_is_a_part_of_the_replica_batch(monkeypatch):
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"micro_batches": 4}, (), ""))
    value = planning.plan(Request(workers="1", runtime="local")).to_json()
    assert (96, 4, 24) == (value["replica_batch"], value["micro_batches"], value["micro_batch"])


@pytest.mark.parametrize(("workers", "batch"), [("0", 192), ("2", 64), ("3", 64), ("5", 32)])
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
    assert STATED | expected == planning.plan(Request(workers="2", runtime="local")).to_json()["training"]


def test_a_precision_that_the_strategy_cannot_have_is_refused(monkeypatch):
    monkeypatch.setattr(configuration, "resolve", lambda *_: (CONFIG | {"precision": "fp16"}, (), ""))
    assert str(refusal(Request(ps="1", runtime="local"))).startswith("--precision fp16: ParameterServerStrategy has ")


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
