"""ResNet-50 v1.5, which serves to compare machines, and ResNet-20 for small images.

Sources: K. He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385. The blocks
of v1.5, as NVIDIA calls it, halve the image in their 3x3 convolution instead of the first 1x1. It takes more time for
each image than `keras.applications.ResNet50`, which is v1.

Shapes: B batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

from tensorflow import keras  # Keras 3, or tf_keras if `--loop fit` needs it

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Filters, blocks, and the stride of the first block."""
EXPANSION = 4


def resnet50(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return ResNet-50 v1.5.

    Args:
        image_shape: (height, width, channels).

    Returns:
        A model from pixels `[B, H, W, C]` of 0 to 255 to logits `[B, K] float32`.
    """
    layers = keras.layers
    images = keras.Input(image_shape, dtype="float32", name="image")
    features = layers.Rescaling(1 / 127.5, offset=-1)(images)
    features = layers.ReLU()(_normalized(features, 64, 7, 2))
    features = layers.MaxPooling2D(3, 2, padding="same")(features)
    for filters, blocks, stride in STAGES:
        for block in range(blocks):
            features = _bottleneck(features, filters, 1 if block else stride, projects=not block)
    features = layers.GlobalAveragePooling2D()(features)
    logits = layers.Dense(num_classes, dtype="float32", name="logits")(features)  # in full precision under any policy
    return keras.Model(images, logits, name="resnet50")


def resnet20(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return ResNet-20 for images as small as CIFAR-10's (section 4.2 of He et al.), with projections as shortcuts.

    In training, images are flipped at random.

    Args:
        image_shape: (height, width, channels).

    Returns:
        A model from pixels `[B, H, W, C]` of 0 to 255 to logits `[B, K] float32`.
    """
    layers = keras.layers
    images = keras.Input(image_shape, dtype="float32", name="image")
    features = layers.RandomFlip("horizontal")(layers.Rescaling(1 / 127.5, offset=-1)(images))
    features = layers.ReLU()(_normalized(features, 16, 3))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if filters > 16 and not block else 1
            shortcut = features if stride == 1 else _normalized(features, filters, 1, stride)
            features = layers.ReLU()(_normalized(features, filters, 3, stride))
            features = layers.ReLU()(layers.Add()([_normalized(features, filters, 3), shortcut]))
    features = layers.GlobalAveragePooling2D()(features)
    logits = layers.Dense(num_classes, dtype="float32", name="logits")(features)  # in full precision under any policy
    return keras.Model(images, logits, name="resnet20")


def _bottleneck(features: Any, filters: int, stride: int, *, projects: bool) -> Any:
    layers = keras.layers
    shortcut = _normalized(features, EXPANSION * filters, 1, stride) if projects else features
    features = layers.ReLU()(_normalized(features, filters, 1))
    features = layers.ReLU()(_normalized(features, filters, 3, stride))
    features = _normalized(features, EXPANSION * filters, 1)
    return layers.ReLU()(layers.Add()([features, shortcut]))


def _normalized(features: Any, filters: int, size: int, stride: int = 1) -> Any:
    layers = keras.layers
    convolution = layers.Conv2D(filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal")
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(convolution(features))
