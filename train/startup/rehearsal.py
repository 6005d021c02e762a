"""Rehearsal of a waiting standby process: one step of a small training, whose results are discarded.

The first trace of a training step takes more than twice as long as the next one in the same process, because TensorFlow
and Keras import modules late and autograph caches converted functions.
"""

import tensorflow as tf
from tensorflow import keras
from tensorflow.python.eager import context  # forgetting its devices has no public name

from train import patches
from train.config import TrainConfig
from train.data import feeds
from train.data.batches import BatchSlice
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import models, objectives, optimizers

EXAMPLES = 8
IMAGE = (28, 28, 1)
CLASSES = 10


def can_rehearse(config: TrainConfig) -> bool:
    """Whether a rehearsal helps: with the custom loop, and without a GPU, which belongs to the training process."""
    return config.loop == "custom" and not tf.config.list_physical_devices("GPU")


def rehearse_step() -> None:
    """Train one step of a built-in model on synthetic data, then reset devices, names and seeds.

    The run is not touched and the user's modules are not imported, because a tensor that one of them kept would become
    invalid.
    """
    patches.apply()
    strategy = tf.distribute.MirroredStrategy(["/CPU:0"])
    with strategy.scope():
        model = models.build_by_name("two_conv_cnn", IMAGE, CLASSES)
        optimizer = optimizers.build_optimizer(TrainConfig())
        optimizer.build(model.trainable_variables)
        policy = optimizers.build_policy(TrainConfig(), optimizer)
    objective = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)
    train_step = TrainStep(model, policy, objective, EXAMPLES, 1)
    steps.gathering(strategy)(0)
    examples = feeds.ArrayExamples(
        tf.zeros([EXAMPLES, *IMAGE], tf.uint8), tf.range(EXAMPLES, dtype=tf.int64) % CLASSES, weights=None
    )
    feed = feeds.gathering_feed(examples, BatchSlice(EXAMPLES, seed=0))
    steps.SynchronousSteps(strategy, train_step, feed, 1)(0, 1)
    keras.backend.clear_session()
    context._reset_context()  # a cluster can only be formed before any device is used
