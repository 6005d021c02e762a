"""A small Transformer."""

from tensorflow import keras

layers = keras.layers


class Positions(layers.Layer):
    """Adds a trained vector to each position."""

    def build(self, input_shape):
        """Create the vectors, `[T, C]`."""
        self.table = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="table")

    def call(self, inputs):
        """Return `[B, T, C]`."""
        return inputs + self.table


def model(feature_shape, num_outputs):
    """Return the network: windows `[B, T, 1]` to the values that follow, `[B, num_outputs]`."""
    inputs = keras.Input(feature_shape)
    x = Positions()(layers.Dense(32)(inputs))
    for _ in range(2):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.Dropout(0.1)(layers.MultiHeadAttention(4, 8)(normalized, normalized))
        hidden = layers.Dense(64, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(32)(hidden))
    x = layers.Flatten()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(num_outputs)(x))
