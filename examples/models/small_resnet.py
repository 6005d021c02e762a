"""A small ResNet on synthetic 32x32x3 images whose class is their brightest quarter."""

import numpy as np
from tensorflow import keras

from train.config import Optimizer, TrainConfig


def data():
    """Return 3,840 images to train with and 960 to test with."""
    random = np.random.default_rng(0)
    images = random.integers(0, 200, (4800, 32, 32, 3)).astype("uint8")
    labels = random.integers(0, 4, 4800)
    for image, label in zip(images, labels, strict=True):
        top, left = 16 * (label // 2), 16 * (label % 2)
        image[top : top + 16, left : left + 16] += 55
    return {
        "train": (images[:3840], labels[:3840]),
        "test": (images[3840:], labels[3840:]),
        "classes": ["top left", "top right", "bottom left", "bottom right"],
    }


def model(feature_shape, num_outputs):
    """Return a network of three residual blocks."""
    layers = keras.layers

    def block(features, filters, strides):
        shortcut = layers.Conv2D(filters, 1, strides)(features)
        features = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(features)
        features = layers.BatchNormalization()(features)
        features = layers.ReLU()(features)
        features = layers.Conv2D(filters, 3, padding="same", use_bias=False)(features)
        features = layers.BatchNormalization()(features)
        return layers.ReLU()(layers.Add()([features, shortcut]))

    images = keras.Input(feature_shape, name="image")
    features = layers.Rescaling(1 / 127.5, offset=-1)(images)
    for filters in (8, 16, 32):
        features = block(features, filters, strides=2)
    features = layers.Dropout(0.1)(layers.GlobalMaxPooling2D()(layers.AveragePooling2D(2)(features)))
    logits = layers.Dense(num_outputs, kernel_regularizer=keras.regularizers.L2(1e-4))(layers.Flatten()(features))
    return keras.Model(images, logits)


def preset():
    """Return the configuration of the training."""
    return TrainConfig(
        dataset="small_resnet:data",
        model="small_resnet:model",
        global_batch=96,
        epochs=2,
        log_every=1,
        optimizer=Optimizer(learning_rate=3e-3, warmup_steps=10),
    )
