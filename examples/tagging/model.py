"""A recurrent network that reads in both directions; its mask keeps padding out of losses and scores."""

from data import WORDS
from tensorflow import keras


def model(feature_shape, num_outputs):
    """Return the network: numbers of words `[B, T]` to the logits of every word, `[B, T, num_outputs]`."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(feature_shape, dtype="int32"),
            layers.Embedding(WORDS, 16, mask_zero=True),
            layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
            layers.Dense(num_outputs),
        ]
    )
