"""Sentiment of film reviews with a Transformer's encoder, on TFDS's `imdb_reviews`. Not verified on real data.

Source of the model: A. Nandan, Text classification with Transformer,
https://keras.io/examples/nlp/text_classification_with_transformer/
"""

from __future__ import annotations

from typing import Any

from train.config import Optimizer, TrainConfig

VOCABULARY = 20_000
"""Number of word ids, see `train/data/prepare/tfds_datasets.py`."""
WIDTH, HEADS, HIDDEN, DROPOUT = 32, 2, 32, 0.1


def model(feature_shape: tuple[int, ...], num_outputs: int) -> Any:
    """Return a network from word ids `[B, T] int32`, 0 for padding, to logits `[B, 2] float32`."""
    import tensorflow as tf
    from tensorflow import keras

    layers = keras.layers
    (length,) = feature_shape
    words = keras.Input(feature_shape, dtype="int32", name="words")
    places = layers.Embedding(length, WIDTH, name="places")(tf.range(length))
    flow = layers.Embedding(VOCABULARY, WIDTH, name="words_embedding")(words) + places
    attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")(flow, flow)
    flow = layers.LayerNormalization(epsilon=1e-6)(flow + layers.Dropout(DROPOUT)(attended))
    hidden = layers.Dense(WIDTH)(layers.Dense(HIDDEN, activation="relu")(flow))
    flow = layers.LayerNormalization(epsilon=1e-6)(flow + layers.Dropout(DROPOUT)(hidden))
    flow = layers.Dropout(DROPOUT)(layers.GlobalAveragePooling1D()(flow))
    flow = layers.Dropout(DROPOUT)(layers.Dense(20, activation="relu")(flow))
    return keras.Model(words, layers.Dense(num_outputs, name="logits")(flow), name="imdb_transformer")


def preset() -> TrainConfig:
    """Return the configuration."""
    return TrainConfig(
        dataset="imdb_reviews",
        model="train.presets.imdb_transformer:model",
        global_batch=48,
        epochs=2.0,
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=100),
    )
