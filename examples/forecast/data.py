"""A series of values, cut into windows: the past of each, and the future to predict."""

import numpy as np

PAST, FUTURE = 24, 6


def series():
    """Return the values, `[T]`; replace this by the reading of your file."""
    time = np.arange(1600)
    return np.sin(time / 4) + np.sin(time / 11) / 2 + np.random.default_rng(0).normal(0, 0.05, len(time))


def data():
    """Return windows `[N, PAST, 1]` and what follows each, `[N, FUTURE]`; the end of the series is held out."""
    windows = np.lib.stride_tricks.sliding_window_view(series(), PAST + FUTURE)
    features, labels = windows[:, :PAST, None], windows[:, PAST:]
    # No value of the training's windows is in one of the test's.
    first = 1200 + PAST + FUTURE
    return {"train": (features[:1200], labels[:1200]), "test": (features[first:], labels[first:])}
