"""Whether a review is good: a classification of sentences, as word numbers through an embedding."""

import itertools
import zlib

import numpy as np
from tensorflow import keras

from train.config import Optimizer, TrainConfig

WORDS = 2048
"""Words are numbered by a hash of theirs, so that there is no vocabulary to keep; 0 fills up short sentences."""
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


def model(feature_shape, num_outputs):
    """Return a network from word numbers `[B, LENGTH]` to logits `[B, 2]`."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(feature_shape, dtype="int32"),
            layers.Embedding(WORDS, 16),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(num_outputs),
        ]
    )


def preset():
    """Return the complete configuration."""
    return TrainConfig(
        dataset="reviews:data",
        model="reviews:model",
        global_batch=48,
        epochs=12,
        log_every=5,
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=0),
    )
