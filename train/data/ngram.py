"""An interpolated trigram model of bytes: the baseline that a language model must beat.

Source: F. Jelinek and R. Mercer, Interpolated estimation of Markov source parameters from sparse data, 1980. The
weights of the orders are those of a small grid that fit a held-out tenth of the training text best.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from train.data.sources import Source

ORDERS = 3
GRID = tuple(share / 20 for share in range(20))
UNSEEN = 0.001
"""The weight of a uniform distribution, for unseen sequences."""
HELD_OUT = 10
"""Divisor of the training text's length for the part that is held out to choose the weights."""


def trigram_perplexity(train: np.ndarray, test: np.ndarray, vocabulary: int = 256) -> float:
    """Return the perplexity for each byte of `test` under counts of `train`, both `[N] uint8`, texts in order."""
    border = len(train) - max(ORDERS, len(train) // HELD_OUT)
    held = _probabilities(train[:border], train[border:], vocabulary)
    higher = (weights for weights in itertools.product(GRID, repeat=ORDERS - 1) if sum(weights) <= 1 - UNSEEN)
    candidates = [(1 - UNSEEN - sum(weights), *weights) for weights in higher]
    best = min(candidates, key=lambda weights: _perplexity(held, weights, vocabulary))
    return _perplexity(_probabilities(train, test, vocabulary), best, vocabulary)


def of_source(source: Source) -> float:
    """Return the baseline of a prepared text."""
    assert source.arrays is not None
    train, test = (np.fromfile(split.features.path, np.uint8) for split in (source.arrays.train, source.arrays.test))
    return trigram_perplexity(train, test)


def _perplexity(probabilities: list[np.ndarray], weights: Sequence[float], vocabulary: int) -> float:
    mixed = UNSEEN / vocabulary + sum(weight * values for weight, values in zip(weights, probabilities, strict=True))
    return float(np.exp(-np.log(mixed).mean()))


def _probabilities(train: np.ndarray, test: np.ndarray, vocabulary: int) -> list[np.ndarray]:
    return [_of_order(train, test, order, vocabulary) for order in range(1, ORDERS + 1)]


def _of_order(train: np.ndarray, test: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """Return the probability of each byte of `test`, from the third, by the counts of sequences of one length.

    Only sequences that occur are stored: few of the possible ones do.
    """
    known, counts = np.unique(_keys(train, order, vocabulary), return_counts=True)
    contexts, which = np.unique(known // vocabulary, return_inverse=True)
    of_context = np.bincount(which, weights=counts)
    keys = _keys(test, order, vocabulary)[ORDERS - order :]
    return _look_up(known, counts, keys) / np.maximum(_look_up(contexts, of_context, keys // vocabulary), 1)


def _look_up(known: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the value of each key, 0 for unknown keys; `known` is sorted."""
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, values[places], 0)


def _keys(text: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """Return the number of each sequence of `order` bytes."""
    keys = np.zeros(len(text) - order + 1, np.int64)
    for offset in range(order):
        keys = keys * vocabulary + text[offset : len(text) - order + 1 + offset]
    return keys
