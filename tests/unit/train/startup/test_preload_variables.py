"""The environment variables that TensorFlow reads while it is imported."""

import os

import pytest

from train.config import TrainConfig
from train.startup import preload

ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
LIMIT = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (LOG_LEVEL, "KERAS_BACKEND", ONEDNN, LIMIT):
        monkeypatch.setenv(name, "")  # so that the test removes the variable afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", [LOG_LEVEL, ONEDNN])
def test_what_the_user_has_set_stays(name, monkeypatch):
    """`TF_ENABLE_ONEDNN_OPTS=0 invoke up` must go without."""
    monkeypatch.setenv(name, "0")
    preload.set_variables(TrainConfig(onednn="on"), "one")
    expected = {LOG_LEVEL: "2", ONEDNN: "1"} | {name: "0"}
    assert expected == {other: os.environ[other] for other in expected}


def test_keras_computes_with_tensorflow_whatever_it_does_elsewhere(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    preload.set_variables(TrainConfig(), "one")
    assert "tensorflow" == os.environ["KERAS_BACKEND"]


@pytest.mark.parametrize(
    ("setting", "deterministic", "value"),
    [
        ("on", True, ("1", None)),
        ("avx2", True, ("1", "AVX2")),
        ("off", True, ("0", None)),
        ("auto", False, (None, None)),
        ("auto", True, ("0", None)),  # nobody has tried the model
    ],
)
def test_onednn_is_as_it_is_configured(setting, deterministic, value):
    preload.set_variables(TrainConfig(onednn=setting, deterministic=deterministic), "one")
    assert value == (os.environ.get(ONEDNN), os.environ.get(LIMIT))
