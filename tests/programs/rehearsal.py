"""Two steps of a training in a cluster, after a rehearsal or without one."""

import json
import os
import sys
from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.system.ports import free_ports
from train import patches
from train.config import TrainConfig
from train.data import feeds
from train.data.batches import Batch, BatchSlice
from train.data.feeds import Feed
from train.loops import steps
from train.loops.train_step import TrainStep
from train.model import models, objectives, optimizers
from train.model.gradients import GradientPolicy
from train.saving.saved_weights import weights_sha256
from train.startup import rehearsal


def main(result: Path, rehearses: bool) -> None:
    if rehearses:
        rehearsal.rehearse_step()
    (port,) = free_ports(1)
    cluster = {"cluster": {"chief": [f"127.0.0.1:{port}"]}, "task": {"type": "chief", "index": 0}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    with strategy.scope():
        model = models.build_by_name("two_conv_cnn", (28, 28, 1), 10)
        optimizer = optimizers.build_optimizer(TrainConfig())
        optimizer.build(model.trainable_variables)
    objective = objectives.build_by_name("sparse_categorical_crossentropy", classifies=True)
    examples = feeds.ArrayExamples(
        tf.cast(tf.random.stateless_uniform([64, 28, 28, 1], [1, 2], 0, 255), tf.uint8),
        tf.range(64, dtype=tf.int64) % 10,
        None,
    )

    def batch(_given: object, step: tf.Tensor, replica: tf.Tensor) -> Batch:
        return feeds.train_batch(examples, step, replica, BatchSlice(16, 7))

    train_step = TrainStep(model, GradientPolicy(optimizer), objective, 16, 1)
    losses = steps.SynchronousSteps(strategy, train_step, Feed(lambda: (), batch), 2)(0, 2).losses
    found = {
        "losses": losses.tolist(),
        "weights_sha256": weights_sha256(model),
        "names": [weight.path for weight in model.trainable_variables],
        "tasks": strategy.cluster_resolver.cluster_spec().as_dict(),
    }
    result.write_text(json.dumps(found | {"tasks": len(found["tasks"]["chief"])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "rehearsed")
    os._exit(0)
