"""Users' models and losses, tried on the machine that starts the run, in a process that may end or print."""

import subprocess
from collections.abc import Callable

import pytest

from cluster.contract import spec
from cluster.host.launch import configuration
from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.data.prepare import preparation

PARTS = """
import sys
import numpy as np
from tensorflow import keras

def data():
    split = np.ones((4, 2)), np.array([0, 1, 0, 1])
    return {"train": split, "test": split}

def good(shape, outputs):
    print("theirs")
    return keras.Sequential([keras.Input(shape), keras.layers.Dense(outputs)])

def exits(shape, outputs): sys.exit(0)
"""


@pytest.fixture
def check(tmp_path, monkeypatch) -> Callable[[str], None]:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_tried.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path / "own")
    preparation.prepare_dataset("own_tried:data", tmp_path / "data")

    def of(model: str) -> None:
        config = TrainConfig(dataset="own_tried:data", model=f"own_tried:{model}", global_batch=4).to_json()
        configuration.check_config(config, spec.build(workers=0), [str(tmp_path / "own")])

    return of


def test_matching_parts_pass_and_what_they_print_is_not_shown(check, capfd):
    check("good")
    assert "" == capfd.readouterr().out


def test_a_model_that_ends_the_process_is_refused(check):
    with pytest.raises(UsageError, match=r"sys\.exit\(0\)"):
        check("exits")


def test_built_in_parts_are_not_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", None)
    for config in (TrainConfig(), TrainConfig(dataset="train.presets.resnet50_synthetic:imagenet", model="resnet50")):
        configuration.check_config(config.to_json(), spec.build(workers=0), [])
