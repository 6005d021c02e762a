"""Users' models and losses, tried on the machine that starts the run, in a process that may print."""

import subprocess

from cluster.contract import spec
from cluster.host.launch import configuration
from tests.support import own_module
from train.config import TrainConfig
from train.data.prepare import preparation

PARTS = """
import numpy as np
from tensorflow import keras

def data():
    split = np.ones((4, 2)), np.array([0, 1, 0, 1])
    return {"train": split, "test": split}

def good(shape, outputs):
    print("theirs")
    return keras.Sequential([keras.Input(shape), keras.layers.Dense(outputs)])
"""


def test_matching_parts_pass_and_what_they_print_is_not_shown(tmp_path, monkeypatch, capfd):
    own_module.write(monkeypatch, tmp_path, "own_tried", PARTS)
    preparation.prepare_dataset("own_tried:data", tmp_path / "data")
    capfd.readouterr()
    config = TrainConfig(dataset="own_tried:data", model="own_tried:good", global_batch=4).to_json()
    configuration.check_config(config, spec.build(workers=0), [str(tmp_path)])
    assert "" == capfd.readouterr().out


def test_built_in_parts_are_not_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", None)
    for config in (TrainConfig(), TrainConfig(dataset="train.presets.resnet50_synthetic:imagenet", model="resnet50")):
        configuration.check_config(config.to_json(), spec.build(workers=0), [])
