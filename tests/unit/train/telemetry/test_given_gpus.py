"""A task that was given GPUs trains on them or says that it cannot: never on CPUs without a word."""

import pytest

from cluster.contract.spec import Role, Task
from cluster.host import nvidia
from cluster.system.errors import EXIT_PREREQUISITE, PrerequisiteError
from train import strategy


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """The GPUs that TensorFlow sees, to be filled."""
    found: list[str] = []
    monkeypatch.setattr(
        strategy.tf.config, "list_physical_devices", lambda kind: list(found) if kind == "GPU" else ["CPU"]
    )
    monkeypatch.setattr(strategy.tf.config.experimental, "set_memory_growth", lambda gpu, grows: None)
    monkeypatch.setattr(strategy.tf.config, "set_logical_device_configuration", lambda cpu, devices: None)
    return found


def give(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have the plan give this task as many GPUs."""
    ids = tuple(str(index) for index in range(count))
    for name, value in nvidia.Placement({"chief": ids}).environment("chief").items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "visible", "devices"),
    [(2, 2, ["GPU:0", "GPU:1"]), (0, 1, ["GPU:0"]), (0, 0, ["CPU:0", "CPU:1"])],  # without GPUs, logical CPUs
)
def test_gpus_that_are_there_are_used(monkeypatch, seen, given, visible, devices):
    if given:
        give(monkeypatch, given)
    seen += ["gpu"] * visible
    assert devices == strategy.configure_devices(len(devices))


@pytest.mark.parametrize("count", [0, 1])
def test_gpus_that_tensorflow_cannot_use_end_the_task(monkeypatch, seen, count):
    give(monkeypatch, 2)
    seen += ["first"] * count
    with pytest.raises(PrerequisiteError, match=f"TensorFlow sees {count} of 2 GPUs that") as refused:
        strategy.configure_devices(2)
    assert EXIT_PREREQUISITE == refused.value.exit_code


def test_a_task_that_only_serves_checks_them_too(monkeypatch, seen):
    give(monkeypatch, 1)
    monkeypatch.setattr(strategy.tf.distribute, "Server", lambda *_, **__: pytest.fail("it serves"))
    with pytest.raises(PrerequisiteError, match="TensorFlow sees 0 of 1 GPUs"):
        strategy.run_tensorflow_server(Task(Role.WORKER, 0, "worker-0", 2222), 1)
