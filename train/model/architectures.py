"""The built-in architectures: a small CNN, ResNets for images, and a Transformer for the bytes of a text.

Image models are built for an image shape (height, width, channels) and take raw pixels `[B, H, W, C]` of 0 to 255, so
that a served model needs no preprocessing. All models end with logits in float32 under any precision policy.

ResNet (K. He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385): the blocks of ResNet-50 v1.5, as
NVIDIA calls it, halve the image in their 3x3 convolution instead of the first 1x1. It takes more time for each image
than `keras.applications.ResNet50`, which is v1, and serves to compare machines.

Transformer (A. Vaswani et al., Attention Is All You Need, arXiv:1706.03762), with normalization before each sub-layer
as in A. Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), 2019.

Shapes: B batch, H height, W width, C channels, K classes, T tokens of the context, D width of the Transformer,
V tokens of the vocabulary.
"""

from typing import Any

import tensorflow as tf
from tensorflow import keras  # Keras 3, or tf_keras if `--loop fit` needs it

from cluster.system.errors import UsageError

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Of each stage: filters, number of blocks, and stride of the first block."""
EXPANSION = 4


def two_conv_cnn(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return the two-conv CNN of https://www.tensorflow.org/tutorials/distribute/custom_training."""
    return keras.Sequential(
        [
            keras.Input(image_shape, dtype="float32", name="image"),
            keras.layers.Rescaling(1 / 255),  # inside the model: a served model takes raw pixels
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(num_classes, dtype="float32", name="logits"),
        ],
        name="two_conv_cnn",
    )


def resnet50(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Return ResNet-50 v1.5."""
    images = keras.Input(image_shape, dtype="float32", name="image")
    features = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    features = keras.layers.ReLU()(_normalized(features, 64, 7, 2))
    features = keras.layers.MaxPooling2D(3, 2, padding="same")(features)
    for filters, blocks, stride in STAGES:
        for block in range(blocks):
            features = _bottleneck(features, filters, 1 if block else stride, projects=not block)
    features = keras.layers.GlobalAveragePooling2D()(features)
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(features)
    return keras.Model(images, logits, name="resnet50")


def _bottleneck(features: Any, filters: int, stride: int, *, projects: bool) -> Any:
    shortcut = _normalized(features, EXPANSION * filters, 1, stride) if projects else features
    features = keras.layers.ReLU()(_normalized(features, filters, 1))
    features = keras.layers.ReLU()(_normalized(features, filters, 3, stride))
    features = _normalized(features, EXPANSION * filters, 1)
    return keras.layers.ReLU()(keras.layers.Add()([features, shortcut]))


def _normalized(features: Any, filters: int, size: int, stride: int = 1) -> Any:
    convolution = keras.layers.Conv2D(
        filters, size, stride, padding="same", use_bias=False, kernel_initializer="he_normal"
    )
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(convolution(features))


def transformer_lm(
    feature_shape: tuple[int, ...], vocabulary: int, *, layers: int = 4, width: int = 128, heads: int = 4
) -> keras.Model:
    """Return a causal Transformer from tokens `[B, T] int32` of 0 to V-1 to logits `[B, T, V] float32`."""
    if len(feature_shape) != 1:
        raise UsageError(f"--model 'transformer_lm' takes examples of shape (T,), tokens; these have {feature_shape}")
    tokens = keras.Input(feature_shape, dtype="int32", name="tokens")
    values = TokenAndPosition(vocabulary, width, name="embedding")(tokens)
    for number in range(layers):
        values = _attention(values, width, heads, f"layer_{number}_attention")
        values = _feed_forward(values, width, f"layer_{number}_feed_forward")
    values = keras.layers.LayerNormalization(epsilon=1e-5, name="final_norm")(values)
    logits = keras.layers.Dense(vocabulary, dtype="float32", name="logits")(values)
    return keras.Model(tokens, logits, name="transformer_lm")


class TokenAndPosition(keras.layers.Layer):
    """Learned embeddings of the tokens and of their positions, added up: `[B, T] int32` to `[B, T, D]`."""

    def __init__(self, vocabulary: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = keras.layers.Embedding(vocabulary, width, embeddings_initializer=_normal(), name="tokens")
        self._width = width

    def build(self, input_shape: tuple[int | None, int]) -> None:
        self.tokens.build(input_shape)
        self.positions = self.add_weight(
            shape=(input_shape[1], self._width), initializer=_normal(), name="positions", dtype="float32"
        )
        self.built = True

    def call(self, tokens_BT: Any) -> Any:
        values_BTD = self.tokens(tokens_BT)
        return values_BTD + tf.cast(self.positions, values_BTD.dtype)

    def compute_output_shape(self, input_shape: tuple[int | None, int]) -> tuple[int | None, int, int]:
        return (*input_shape, self._width)


def _attention(values: Any, width: int, heads: int, name: str) -> Any:
    normal = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm")(values)
    attention = keras.layers.MultiHeadAttention(heads, width // heads, kernel_initializer=_normal(), name=name)
    return keras.layers.Add(name=f"{name}_add")([values, attention(normal, normal, use_causal_mask=True)])


def _feed_forward(values: Any, width: int, name: str) -> Any:
    normal = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm")(values)
    wide = keras.layers.Dense(4 * width, activation="gelu", kernel_initializer=_normal(), name=f"{name}_up")(normal)
    narrow = keras.layers.Dense(width, kernel_initializer=_normal(), name=f"{name}_down")(wide)
    return keras.layers.Add(name=f"{name}_add")([values, narrow])


def _normal() -> Any:
    return keras.initializers.RandomNormal(stddev=0.02)
