"""Two towers, one for users and one for items: a rating is the product of their vectors."""

from data import ITEMS, USERS
from tensorflow import keras


def model(feature_shape, num_outputs):  # noqa: ARG001
    """Return the network: `{"user": [B], "item": [B]}` to ratings `[B, 1]`."""
    layers, inputs, towers = keras.layers, {}, []
    for name, count in (("user", USERS), ("item", ITEMS)):
        inputs[name] = keras.Input(feature_shape[name], dtype="int32", name=name)
        vector = layers.Embedding(count, 16)(inputs[name])
        towers.append(layers.Dense(8)(layers.Dense(32, "relu")(vector)))
    return keras.Model(inputs, layers.Dot(axes=-1)(towers))
