"""The environment variables that TensorFlow and Keras read while they are imported."""

from __future__ import annotations

import os

DEFAULTS = {"TF_CPP_MIN_LOG_LEVEL": "2"}
ONEDNN = {"on": "1", "off": "0"}
"""`TF_ENABLE_ONEDNN_OPTS` for each setting of the training configuration but `auto`, which leaves it to TensorFlow."""


def set_defaults(onednn: str = "auto") -> None:
    """Set those that are not set. Call before TensorFlow is imported.

    Args:
        onednn: as in the training configuration.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever Keras computes with elsewhere
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if onednn in ONEDNN:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", ONEDNN[onednn])


def set_for_trial(onednn: str, *, legacy_keras: bool) -> None:
    """Set what a process that only tries a model out has: no GPU, a quiet TensorFlow. Call before its import."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    set_defaults(onednn)
    if legacy_keras:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
