"""Sequences of words of different lengths, with a tag for every word."""

import numpy as np

WORDS, LENGTH = 40, 20
"""Words are numbers from 1; 0 fills up short sequences."""


def sequences(count, random):
    """Return words `[N, LENGTH] int32` and their tags: whether a word is even, and whether it occurred before."""
    words, tags = np.zeros((2, count, LENGTH), np.int32)
    for numbers, labels in zip(words, tags, strict=True):
        length = random.integers(1, LENGTH + 1)
        numbers[:length] = random.integers(1, WORDS, length)
        seen = [word in numbers[:at] for at, word in enumerate(numbers[:length])]
        labels[:length] = 2 * np.array(seen) + numbers[:length] % 2
    return words, tags


def data():
    """Return the sequences to train and to test on."""
    random, classes = np.random.default_rng(0), ["even", "odd", "even, again", "odd, again"]
    return {"train": sequences(1200, random), "test": sequences(300, random), "classes": classes}
