"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", on the data and the model of our runs.

Source: https://www.tensorflow.org/tutorials/distribute/custom_training. With TF_CONFIG it is one of several workers
(https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl), without it trains alone.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from benchmarks.baselines.cnn import create_model, create_strategy
from benchmarks.baselines.common import arguments, log_step, train_arrays


def main() -> None:
    """Train."""
    options = arguments()
    strategy = create_strategy(options.threads)

    train_images, train_labels = train_arrays(options.arrays)
    train_dataset = (
        tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(len(train_images))
        .batch(options.global_batch)
    )
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

    with strategy.scope():
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        model = create_model()
        optimizer = tf.keras.optimizers.Adam(learning_rate=options.learning_rate)

    def compute_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
        per_example_loss = loss_object(labels, predictions)
        return tf.nn.compute_average_loss(per_example_loss, global_batch_size=options.global_batch)

    def train_step(inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def distributed_train_step(dataset_inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    step = 0
    while True:
        total_loss, num_batches = 0.0, 0
        for batch in train_dist_dataset:
            total_loss += distributed_train_step(batch)
            num_batches += 1
            step += 1
            log_step(step, options.steps)
            if step == options.steps:
                return
        print(f"loss {total_loss / num_batches}, accuracy {train_accuracy.result()}", file=sys.stderr)
        train_accuracy.reset_state()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # servers whose peers end at the same moment may hang in their teardown
