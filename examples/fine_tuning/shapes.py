"""Fine-tuning: a network that knows rectangles, from `rectangles.npz`, learns to tell crosses from rings.

`python shapes.py` trains the network on rectangles first and writes that file; here it stands for weights that you got
elsewhere. Tasks reach no network, so that pretrained weights come from a file.
"""

from pathlib import Path

import numpy as np
from tensorflow import keras

PRETRAINED = Path(__file__).with_name("rectangles.npz")
SIZE = 24


def draw(kind, random):
    """Return an image `[SIZE, SIZE, 1] uint8` with one shape somewhere in it, and noise."""
    image = random.integers(0, 60, (SIZE, SIZE, 1))
    top, left = random.integers(1, SIZE - 12, 2)
    part = image[top : top + 11, left : left + 11]
    if kind == "wide":
        part[3:8, :] += 150
    elif kind == "high":
        part[:, 3:8] += 150
    elif kind == "cross":
        part[4:7, :] += 150
        part[:, 4:7] += 150
    else:  # a ring
        part[[0, 1, 9, 10], :] += 150
        part[:, [0, 1, 9, 10]] += 150
    return np.clip(image, 0, 255).astype(np.uint8)


def images(kinds, count, seed):
    """Return images and labels of some kinds."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(kinds), count)
    return np.stack([draw(kinds[label], random) for label in labels]), labels


def base():
    """Return the part that is pretrained: images `[B, SIZE, SIZE, 1]` to features `[B, 64]`."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ],
        name="base",
    )


def data():
    """Return few images of the new kinds: too few to learn from without the pretrained part."""
    classes = ["cross", "ring"]
    return {"train": images(classes, 192, 1), "test": images(classes, 192, 2), "classes": classes}


def model(feature_shape, num_outputs):
    """Return the pretrained part, which stays as it is, with a new last layer."""
    pretrained = base()
    with np.load(PRETRAINED) as file:
        pretrained.set_weights([file[name] for name in file.files])
    pretrained.trainable = False
    inputs = keras.Input(feature_shape)
    return keras.Model(inputs, keras.layers.Dense(num_outputs)(pretrained(inputs, training=False)))


def preset():
    """Return the complete configuration."""
    from train.config import Optimizer, TrainConfig  # not known to `python shapes.py`

    return TrainConfig(
        dataset="shapes:data",
        model="shapes:model",
        global_batch=48,
        epochs=30,
        log_every=5,
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=0),
    )


def pretrain():
    """Train on wide and high rectangles, and write the weights without the last layer."""
    features = base()
    whole = keras.Sequential([features, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    whole.compile("adam", loss, metrics=["accuracy"])
    keras.utils.set_random_seed(0)
    whole.fit(*images(["wide", "high"], 1920, 0), batch_size=48, epochs=3, verbose=2)
    np.savez(PRETRAINED, *features.get_weights())
    print(f"wrote {PRETRAINED.name}")


if __name__ == "__main__":
    pretrain()
