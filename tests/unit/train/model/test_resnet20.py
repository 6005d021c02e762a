"""The preset for CIFAR-10, on made-up images of its shape: the real ones are not to be had everywhere."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from train.data import sources
from train.data.prepare import sharding
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import models, objectives, optimizers
from train.presets.cifar10_resnet import preset as cifar10_resnet

EXAMPLES, BATCH, STEPS = {"train": 40, "test": 8}, 8, 12


class Brightness:
    """Images of 32x32x3 whose class is how bright they are."""

    version, classes = "1", tuple("0123456789")

    def open(self) -> dict[str, int]:
        return EXAMPLES

    def examples(self, split: str) -> Iterator[Any]:
        for number in range(EXAMPLES[split]):
            yield np.full((32, 32, 3), 25 * (number % 10), np.uint8), number % 10


def test_the_preset_learns(tmp_path):
    sharding.shard("cifar10", tmp_path, num_shards=2, open_source=lambda *_: Brightness())
    preset = cifar10_resnet()
    config = dataclasses.replace(
        preset, global_batch=BATCH, optimizer=dataclasses.replace(preset.optimizer, warmup_steps=2, decay_steps=STEPS)
    )
    source, strategy = sources.find(config, tmp_path), tf.distribute.OneDeviceStrategy("/CPU:0")
    with strategy.scope():
        keras.utils.set_random_seed(config.seed)
        model = models.of(config, source.feature_shape, source.num_outputs)
        policy = optimizers.policy(config, optimizers.build_for(config, model))
    objective = objectives.of(config, classifies=source.classifies, predicts_text=source.is_text)
    feed = sources.train_feed(strategy, source, 0, BATCH, config.seed)
    train_step = TrainStep(model, policy, objective, BATCH, 1)
    losses = steps.SynchronousSteps(strategy, train_step, feed, STEPS)(0, STEPS, False).losses
    assert losses[-3:].sum() < losses[:3].sum()
    assert sum(int(np.prod(variable.shape)) for variable in model.trainable_variables) == 272_474  # the paper: 0.27 M
