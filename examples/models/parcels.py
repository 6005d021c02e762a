"""The kind and the price of a parcel, from its picture and its weight: two inputs and two outputs."""

import numpy as np
from tensorflow import keras

from train.config import Optimizer, TrainConfig


def data():
    """Return pictures and weights of parcels, with their kinds and prices."""
    random = np.random.default_rng(0)
    kinds, weights = random.integers(0, 3, 1200), random.uniform(0, 2, (1200, 1)).astype("float32")
    pictures = random.integers(0, 150, (1200, 8, 8, 1)).astype("uint8")
    for picture, kind in zip(pictures, kinds, strict=True):
        picture[2 * kind : 2 * kind + 3] += 100
    prices = (kinds + 2 * weights[:, 0]).astype("float32")

    def split(part):
        return {"picture": pictures[part], "weight": weights[part]}, {"kind": kinds[part], "price": prices[part]}

    classes = {"kind": ["book", "shirt", "toy"]}
    return {"train": split(slice(0, 960)), "test": split(slice(960, None)), "classes": classes}


def model(feature_shape, num_outputs):
    """Return a network with an input for each feature and an output for each label."""
    layers = keras.layers
    inputs = {name: keras.Input(shape, name=name) for name, shape in feature_shape.items()}
    seen = layers.Dense(32, "relu", name="seen")(layers.Flatten()(layers.Rescaling(1 / 255)(inputs["picture"])))
    hidden = layers.Dropout(0.1)(layers.Dense(32, "relu", name="both")(layers.Concatenate()([seen, inputs["weight"]])))
    return keras.Model(inputs, {name: layers.Dense(count, name=name)(hidden) for name, count in num_outputs.items()})


def preset():
    """Return the configuration of the training."""
    return TrainConfig(
        dataset="parcels:data",
        model="parcels:model",
        loss="kind=sparse_categorical_crossentropy,price=mean_squared_error",
        loss_weights="price=0.5",
        global_batch=48,
        epochs=8,
        log_every=1,
        optimizer=Optimizer(learning_rate=5e-3, warmup_steps=0),
    )
