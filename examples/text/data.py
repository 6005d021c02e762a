"""Reviews and whether they are good, as numbers of words."""

import itertools
import zlib

import numpy as np

WORDS = 2048
"""A word's number is its hash, so there is no vocabulary to keep; 0 fills up short sentences."""
LENGTH = 12

_SUBJECTS = ("the plot", "the cast", "this film", "the music", "every scene", "the ending")
_ADVERBS = ("really", "simply", "utterly", "quite", "rather")
_GOOD = ("wonderful", "moving", "clever", "funny", "gripping", "superb")
_BAD = ("dull", "tedious", "clumsy", "awful", "predictable", "flat")


def encode(sentence):
    """Return a sentence as `LENGTH` word numbers."""
    numbers = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in sentence.lower().split()][:LENGTH]
    return numbers + [0] * (LENGTH - len(numbers))


def sentences():
    """Yield sentences with their labels; `not` turns a word around, so that single words do not decide."""
    for subject, adverb, negated in itertools.product(_SUBJECTS, _ADVERBS, (False, True)):
        for label, words in enumerate((_BAD, _GOOD)):
            for word in words:
                middle = f"was not {adverb} {word}" if negated else f"was {adverb} {word}"
                yield f"{subject} {middle}", 1 - label if negated else label


def data():
    """Return word numbers `[N, LENGTH] int32` and labels; every fifth sentence is held out."""
    texts, labels = zip(*sentences(), strict=True)
    features = np.array([encode(text) for text in texts], np.int32)
    order = np.random.default_rng(0).permutation(len(texts))
    features, labels = features[order], np.array(labels)[order]
    held_out = np.arange(len(labels)) % 5 == 0
    return {
        "train": (features[~held_out], labels[~held_out]),
        "test": (features[held_out], labels[held_out]),
        "classes": ["bad", "good"],
    }
