"""Imports of a task's program, which take most of its start."""

from __future__ import annotations

import os

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from train.config import TrainConfig
from train.model import variables
from train.patches.quick_imports import quick_imports


def load(run: RunFolder) -> None:
    """Import everything that the tasks of a run need according to its configuration.

    No device is used, so that the process can still be forked, and each copy can form a cluster.
    """
    config = TrainConfig.from_json(read_json(run.config))
    variables.set_defaults(config.onednn)
    if config.needs_tf_keras(run.load_cluster().strategy):
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # read when TensorFlow is imported; tf.keras is then tf_keras
    with quick_imports():
        from train import program  # noqa: F401
