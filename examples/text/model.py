"""An embedding of words, and a layer that reads the whole sentence."""

from data import WORDS
from tensorflow import keras


def model(feature_shape, num_outputs):
    """Return the network: numbers of words `[B, T]` to logits `[B, num_outputs]`."""
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
