"""Will it fit? The bytes of each task, against what it may use."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.contract import spec, user_code
from cluster.host.launch import plan as plans
from cluster.host.nvidia import Placement
from cluster.host.options.request import Request
from cluster.host.runtime.resources import TASK_MEMORY_BYTES, Memory
from cluster.system.errors import UsageError

MIB = 2**20
SIZES = {
    "parameters": 1000,
    "weights_bytes": 10 * MIB,
    "gradients_bytes": 8 * MIB,
    "optimizer_bytes": 16 * MIB,
    "activation_bytes": 1 * MIB,
}


def plan(task_bytes: int = 0, gpu_bytes: int = 0, gpus: Any = (), **options: Any) -> Any:
    config = {"model": "two_conv_cnn", "dataset": "mnist", "global_batch": 64} | {
        name: options.pop(name)
        for name in ("micro_batches", "bitwise_elastic", "model", "dataset", "memory_snapshots")
        if name in options
    }
    return SimpleNamespace(
        cluster=spec.build(**{"workers": 1} | options),
        config=config,
        memory=Memory(task_bytes=task_bytes),
        gpus=Placement(dict(gpus), memory_bytes=gpu_bytes),
        options=Request(),
        runtime=SimpleNamespace(is_remote=False),
        payload=SimpleNamespace(script=None, requirements=None, trial_environment=dict),
        data="60000 examples",
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"chief": 10 + 8 + 16 + 32, "worker-0": 66}),
        ({"micro_batches": 4}, {"chief": 10 + 16 + 16 + 8, "worker-0": 50}),
        ({"workers": 0, "devices": 2}, {"chief": 2 * (34 + 32)}),  # each device holds a replica
        ({"workers": 0, "memory_snapshots": True}, {"chief": 98 + 2 * 26}),
        ({"gpus": {"chief": ("0",)}, "memory_snapshots": True}, {"chief": 2 * 26, "worker-0": 98 - 32 + 2 * 26}),
        (
            {"workers": 1, "ps": 2, "evaluator": True},
            {"chief": 10, "worker-0": 10 + 8 + 64, "ps-0": 13, "ps-1": 13, "evaluator": 10},
        ),
    ],
)
def test_a_task_holds_weights_gradients_state_and_its_micro_batch(options, expected):
    held = plans.assess(plan(**options), SIZES)["task_bytes"]
    assert expected == {name: (size - TASK_MEMORY_BYTES) / MIB for name, size in held.items()}


@pytest.mark.parametrize(
    ("limit", "free_bytes", "fits"),
    [
        ({"task_bytes": TASK_MEMORY_BYTES + 66 * MIB}, 2**40, True),
        ({"task_bytes": TASK_MEMORY_BYTES + 65 * MIB}, 2**40, False),
        ({"gpu_bytes": 67 * MIB}, 2**40, True),
        ({"gpu_bytes": 65 * MIB}, 2**40, False),
        ({}, 2 * TASK_MEMORY_BYTES, False),  # processes must fit together
    ],
)
def test_a_container_a_gpu_and_the_machine_must_hold_their_tasks(monkeypatch, limit, free_bytes, fits):
    monkeypatch.setattr(plans.memory, "free_bytes", lambda: free_bytes)
    value = plans.assess(plan(**limit), SIZES)
    assert fits is value["fits"]
    assert fits is not any("NOT fit" in line for line in plans.memory_lines(SIZES | value))


def test_a_model_that_cannot_be_counted_is_not_an_error(monkeypatch):
    monkeypatch.setattr(user_code, "run", Mock(side_effect=UsageError("no such model")))
    value = plans.estimate_memory(plan())
    assert {"unknown": "no such model"} == value
    assert 1 == len(plans.memory_lines(value))


def test_a_model_is_counted_on_its_data_or_that_of_your_own(monkeypatch):
    monkeypatch.setattr(user_code, "run", lambda *given, **more: SIZES)
    monkeypatch.setattr(plans.memory, "free_bytes", lambda: 2**40)
    unprepared, own = plan(model="mine:model"), plan(dataset="mine:data")
    unprepared.data = own.data = ""  # as always of a user's dataset: its function may have changed
    assert {"unknown"} == set(plans.estimate_memory(unprepared))
    assert plans.estimate_memory(own) == SIZES | plans.assess(own, SIZES)


def test_what_has_no_replicas_of_a_known_model_is_not_assessed():
    pipeline = spec.build(strategy="pipeline", workers=1)
    for without in ({"payload": SimpleNamespace(script=Path("x.py"))}, {"cluster": pipeline}):
        given = plan()
        vars(given).update(without)
        assert plans.estimate_memory(given) is None
    assert [] == plans.memory_lines(None)
