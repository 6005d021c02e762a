"""The environment variables that TensorFlow and Keras read while they are imported, where the user has set none."""

from __future__ import annotations

import os

DEFAULTS = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KERAS_BACKEND": "tensorflow",
    # TensorFlow leaves oneDNN's kernels off on processors without AVX-512, where a convolution's step takes half as
    # long with them. They give the same bits again, and a run records the setting (`train/environment.py`).
    "TF_ENABLE_ONEDNN_OPTS": "1",
}


def set_defaults() -> None:
    """Set those that are not set. Call before TensorFlow is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
