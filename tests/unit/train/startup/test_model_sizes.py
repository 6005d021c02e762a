"""The sizes of a run's model, as TensorFlow counts them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from train.config import Optimizer, TrainConfig
from train.data import sources
from train.startup import model_sizes

PARAMETERS = 121_930


@pytest.fixture(autouse=True)
def images(monkeypatch):
    """Images of 28 x 28 in 10 classes."""
    source = SimpleNamespace(feature_shape=(28, 28, 1), num_outputs=10)
    monkeypatch.setattr(sources, "open_source", lambda config, data_dir: source)


@pytest.mark.parametrize(("optimizer", "slots"), [("adam", 2), ("sgd", 1)])
def test_sizes_are_those_of_float32_and_the_optimizer_s_slots(optimizer, slots):
    value = model_sizes.measure_model(TrainConfig(optimizer=Optimizer(name=optimizer)), "one", Path("data"))
    assert (PARAMETERS, 4 * PARAMETERS, 4 * PARAMETERS) == tuple(
        value[name] for name in ("parameters", "weights_bytes", "gradients_bytes")
    )
    assert 0 <= value["optimizer_bytes"] - slots * 4 * PARAMETERS < 100  # its counters


def test_activations_are_the_outputs_of_the_layers():
    value = model_sizes.measure_model(TrainConfig(), "one", Path("data"))
    outputs = 28 * 28 + 26 * 26 * 32 + 13 * 13 * 32 + 11 * 11 * 64 + 5 * 5 * 64 + 64 + 10
    assert 4 * outputs == value["activation_bytes"]
