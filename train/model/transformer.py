"""A decoder-only Transformer that predicts the next token, built from blocks between which a pipeline can be cut.

Sources: A. Vaswani et al., Attention Is All You Need, arXiv:1706.03762; normalization before each sub-layer as in
A. Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), 2019.

Shapes: B batch, T tokens of the context, D width, V tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow import keras  # Keras 3, or tf_keras if `--loop fit` needs it

from cluster.system.errors import UsageError


def transformer_lm(
    feature_shape: tuple[int, ...], vocabulary: int, *, layers: int = 4, width: int = 128, heads: int = 4
) -> keras.Model:
    """Return a Transformer whose output at each position depends only on the tokens up to that position.

    Args:
        feature_shape: (T,).
        vocabulary: V.
        layers: Transformer layers, each of an attention and a feed-forward block.
        width: D, divisible by `heads`.
        heads: heads of each attention.

    Returns:
        A model from tokens `[B, T] int32` of 0 to V-1 to logits `[B, T, V] float32`.
    """
    if len(feature_shape) != 1:
        raise UsageError(f"--model 'transformer_lm' takes examples of shape (T,), tokens; these have {feature_shape}")
    if width % heads:
        raise UsageError(f"--transformer.width {width}: expected a multiple of the {heads} heads")
    make = keras.layers
    tokens = keras.Input(feature_shape, dtype="int32", name="tokens")
    values = TokenAndPosition(vocabulary, width, name="embedding")(tokens)
    for number in range(layers):
        values = _attention(values, width, heads, f"layer_{number}_attention")
        values = _feed_forward(values, width, f"layer_{number}_feed_forward")
    values = make.LayerNormalization(epsilon=1e-5, name="final_norm")(values)
    logits = make.Dense(vocabulary, dtype="float32", name="logits")(values)  # in full precision under any policy
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
    make = keras.layers
    normal = make.LayerNormalization(epsilon=1e-5, name=f"{name}_norm")(values)
    attention = make.MultiHeadAttention(heads, width // heads, kernel_initializer=_normal(), name=name)
    return make.Add(name=f"{name}_add")([values, attention(normal, normal, use_causal_mask=True)])


def _feed_forward(values: Any, width: int, name: str) -> Any:
    make = keras.layers
    normal = make.LayerNormalization(epsilon=1e-5, name=f"{name}_norm")(values)
    wide = make.Dense(4 * width, activation="gelu", kernel_initializer=_normal(), name=f"{name}_up")(normal)
    narrow = make.Dense(width, kernel_initializer=_normal(), name=f"{name}_down")(wide)
    return make.Add(name=f"{name}_add")([values, narrow])


def _normal() -> Any:
    return keras.initializers.RandomNormal(stddev=0.02)
