"""A small convolutional network."""

from tensorflow import keras


def model(feature_shape, num_outputs):
    """Return the network: images `[B, H, W, 3]` to logits `[B, num_outputs]`."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(feature_shape),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(num_outputs),
        ]
    )
