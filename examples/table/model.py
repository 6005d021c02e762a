"""A small network for numbers."""

from tensorflow import keras


def model(feature_shape, num_outputs):
    """Return the network: features `[B, F]` to values `[B, num_outputs]`."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input(feature_shape), layers.Dense(32, "relu"), layers.Dense(16, "relu"), layers.Dense(num_outputs)]
    )
