"""Imports of a task's program, which take most of its start, and the environment variables that they read."""

import os
from typing import Any

from train.config import TrainConfig
from train.patches.quick_imports import quick_imports

ONEDNN = {"on": "1", "avx512": "1", "avx2": "1", "off": "0"}
"""`TF_ENABLE_ONEDNN_OPTS` for each `--onednn` but `auto`: TensorFlow's choice, or `off` with `deterministic`."""
LARGEST_ISA = {"avx512": "AVX512_CORE", "avx2": "AVX2"}
"""`ONEDNN_MAX_CPU_ISA` for each `--onednn` that limits the instructions of oneDNN's kernels."""


def set_variables(config: TrainConfig, strategy: str) -> None:
    """Set the variables that TensorFlow and Keras read, unless the user has. Call before TensorFlow is imported."""
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever the user's Keras is configured for
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    onednn = "off" if config.onednn == "auto" and config.deterministic else config.onednn
    if onednn in LARGEST_ISA:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", LARGEST_ISA[onednn])
    if onednn in ONEDNN:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", ONEDNN[onednn])
    if config.needs_tf_keras(strategy):
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # tf.keras is then tf_keras


def load(config: dict[str, Any], strategy: str) -> None:
    """Import everything that the tasks of a run need according to its configuration, in the form of `config.json`.

    No device is used, so that the process can still be forked, and each copy can form a cluster.
    """
    set_variables(TrainConfig.from_json(config), strategy)
    with quick_imports():
        from train import program  # noqa: F401
