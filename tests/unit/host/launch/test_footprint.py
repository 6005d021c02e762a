"""Will it fit? The bytes of each task, against what it may use; counted once for a built-in model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract import spec, user_code
from cluster.host.gpu.placement import Placement
from cluster.host.launch import footprint
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


def plan(task_bytes: int = 0, gpu_bytes: int = 0, **options: Any) -> Any:
    config = {"model": "two_conv_cnn", "dataset": "mnist", "global_batch": 64} | {
        name: options.pop(name) for name in ("micro_batches", "bitwise_elastic", "model") if name in options
    }
    return SimpleNamespace(
        cluster=spec.build(**{"workers": 1} | options),
        config=config,
        memory=Memory(task_bytes=task_bytes),
        gpus=Placement(memory_bytes=gpu_bytes),
        runtime=SimpleNamespace(is_remote=False),
        payload=SimpleNamespace(script=None, requirements=None, local_path=list),
        data="60000 examples",
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"chief": 10 + 8 + 16 + 32, "worker-0": 66}),
        ({"micro_batches": 4}, {"chief": 10 + 16 + 16 + 8, "worker-0": 50}),
        ({"workers": 0, "devices": 2}, {"chief": 2 * (34 + 32)}),
        (
            {"workers": 1, "ps": 2, "evaluator": True},
            {"chief": 10, "worker-0": 10 + 8 + 64, "ps-0": 13, "ps-1": 13, "evaluator": 10},
        ),
    ],
)
def test_what_each_task_holds(options, expected):
    value = footprint.assess(plan(**options), SIZES)["task_bytes"]
    assert expected == {name: (size - TASK_MEMORY_BYTES) / MIB for name, size in value.items()}


@pytest.mark.parametrize(
    ("options", "free", "fits"),
    [
        ({"task_bytes": TASK_MEMORY_BYTES + 66 * MIB}, 2**40, True),  # a container's
        ({"task_bytes": TASK_MEMORY_BYTES + 65 * MIB}, 2**40, False),
        ({"gpu_bytes": 67 * MIB}, 2**40, True),
        ({"gpu_bytes": 65 * MIB}, 2**40, False),
        ({}, 2 * TASK_MEMORY_BYTES, False),  # of both processes together
    ],
)
def test_a_task_must_fit_where_it_runs(monkeypatch, options, free, fits):
    monkeypatch.setattr(footprint.memory, "available_bytes", lambda: free)
    assert fits is footprint.assess(plan(**options), SIZES)["fits"]


def test_a_built_in_model_is_counted_once(monkeypatch, tmp_path):
    counted = []

    def run(command: list[str], *given: object, **more: object) -> dict[str, Any]:
        counted.append(command)
        return SIZES

    monkeypatch.setattr(user_code, "run", run)
    first, again = footprint.of(plan()), footprint.of(plan())
    assert first and again
    assert (1, first["parameters"]) == (len(counted), again["parameters"])
    (kept,) = (tmp_path / "runs" / ".footprints").iterdir()
    kept.write_text('{"parameters": -1}')  # what is kept is checked
    assert 1000 == footprint.of(plan())["parameters"]
    for _ in range(2):
        footprint.of(plan(model="mine:model"))
    assert 4 == len(counted)


def test_a_model_that_cannot_be_counted_is_no_error(monkeypatch):
    def fail(*given: object, **more: object) -> None:
        raise UsageError("no such model")

    monkeypatch.setattr(user_code, "run", fail)
    assert {"unknown": "no such model"} == footprint.of(plan())


def test_without_its_data_only_a_model_on_the_user_s_own_is_counted(monkeypatch):
    monkeypatch.setattr(user_code, "run", lambda *given, **more: SIZES)
    unprepared = plan()
    unprepared.data = ""
    value = footprint.of(unprepared)
    assert value and {"unknown"} == set(value)
    unprepared.config["dataset"] = "mine:data"
    value = footprint.of(unprepared)
    assert value and 1000 == value["parameters"]


@pytest.mark.parametrize(
    "without",
    [
        {"payload": SimpleNamespace(script=Path("x.py"))},
        {"cluster": spec.build(strategy="pipeline", workers=1)},
    ],
)
def test_what_has_no_replicas_of_a_known_model_is_not_assessed(without):
    given = plan()
    vars(given).update(without)
    assert footprint.of(given) is None
    assert [] == footprint.lines(None)
