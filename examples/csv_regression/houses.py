"""What houses cost: a regression on the CSV file beside this one."""

from pathlib import Path

import numpy as np
from tensorflow import keras

from train.config import Optimizer, TrainConfig

FEATURES = ("rooms", "square_metres", "year", "km_to_centre")


def data():
    """Return features and prices in units of 100,000; every fifth house is held out."""
    table = np.genfromtxt(Path(__file__).with_name("houses.csv"), delimiter=",", names=True)
    features = np.stack([table[name] for name in FEATURES], axis=1)
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    prices = table["price"] / 100_000
    held_out = np.arange(len(table)) % 5 == 0
    return {"train": (features[~held_out], prices[~held_out]), "test": (features[held_out], prices[held_out])}


def model(feature_shape, num_outputs):
    """Return a small network from features `[B, 4]` to prices `[B, 1]`."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input(feature_shape), layers.Dense(32, "relu"), layers.Dense(16, "relu"), layers.Dense(num_outputs)]
    )


def preset():
    """Return the complete configuration."""
    return TrainConfig(
        dataset="houses:data",
        model="houses:model",
        loss="mean_squared_error",
        global_batch=48,
        epochs=30,
        log_every=10,
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=0),
    )
