"""Environment variables that TensorFlow and Keras read when they are imported."""

from __future__ import annotations

import os

DEFAULTS = {"TF_CPP_MIN_LOG_LEVEL": "2"}
ONEDNN = {"on": "1", "off": "0"}
"""`TF_ENABLE_ONEDNN_OPTS` for each `--onednn` but `auto`, which leaves the choice to TensorFlow."""


def set_defaults(onednn: str = "auto") -> None:
    """Set defaults of the variables; `onednn` is that of the configuration. Call before TensorFlow is imported."""
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever the user's Keras is configured for
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if onednn in ONEDNN:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", ONEDNN[onednn])


def set_for_trial(onednn: str, *, legacy_keras: bool) -> None:
    """Set the variables of a process that only tries a model: no GPU, no log. Call before TensorFlow is imported."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    set_defaults(onednn)
    if legacy_keras:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
