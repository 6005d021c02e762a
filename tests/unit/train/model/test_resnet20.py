"""The preset for CIFAR-10, on made-up images of its shape: the real ones are not to be had everywhere."""

import dataclasses

import numpy as np
import tensorflow as tf
from tensorflow import keras

from tests.support.listed_examples import ListedExamples, shard
from train.data import sources
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import models, objectives, optimizers
from train.presets.cifar10_resnet import preset as cifar10_resnet

BATCH, STEPS = 8, 12
IMAGES = [(np.full((32, 32, 3), 25 * (number % 10), np.uint8), number % 10) for number in range(40)]
"""Images whose class is their brightness."""


def test_the_preset_learns(tmp_path):
    shard(tmp_path, "cifar10", ListedExamples(IMAGES, IMAGES[:8], classes=tuple("0123456789")))
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
