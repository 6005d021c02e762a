"""A small network for numbers."""

from data import data
from tensorflow import keras


def model(feature_shape, num_outputs):
    """Return the network: features `[B, F]` to values `[B, num_outputs]`."""
    layers = keras.layers
    features, _ = data()["train"]  # not those that are held out
    normalize = layers.Normalization()
    normalize.adapt(features)  # weights, which checkpoints and the export keep
    hidden = [layers.Dense(32, "relu"), layers.Dense(16, "relu")]
    return keras.Sequential([keras.Input(feature_shape), normalize, *hidden, layers.Dense(num_outputs)])
