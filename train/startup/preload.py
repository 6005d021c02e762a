"""What a task's program imports, which is most of what its start takes."""

from __future__ import annotations

import os

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from train.config import TrainConfig
from train.model import variables
from train.patches.quick_imports import quick_imports


def load(run: RunFolder) -> None:
    """Import all that the tasks of a run need, as the run's configuration requires.

    No device is used: whoever called this can still be copied, and each copy form a cluster.
    """
    trained = TrainConfig.from_json(read_json(run.config))
    variables.set_defaults(trained.onednn)
    if trained.needs_tf_keras(run.load_cluster().strategy):
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # read when TensorFlow is imported: tf.keras is tf_keras then
    with quick_imports():
        from train import program  # noqa: F401
