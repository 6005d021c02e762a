"""Curves of 64 values that three hidden numbers determine: both the features and the labels."""

import numpy as np

VALUES, HIDDEN = 64, 3


def data():
    """Return the curves, `[N, VALUES] float32`, to train and to test on."""
    random = np.random.default_rng(0)
    waves = random.normal(size=(HIDDEN, VALUES))
    curves = 1 / (1 + np.exp(-random.normal(size=(1500, HIDDEN)) @ waves))
    return {"train": (curves[:1200], curves[:1200]), "test": (curves[1200:], curves[1200:])}
