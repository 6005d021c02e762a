"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", on the data and the model of our runs.

Source: https://www.tensorflow.org/tutorials/distribute/custom_training. With TF_CONFIG it is one of several workers
(https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl, the source of the input pipeline), otherwise it
trains alone. With `--steps-per-call` it iterates inside a `tf.function`, as in the first tutorial's last section.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from benchmarks.baselines.cnn import create_model, create_strategy
from benchmarks.baselines.common import EVERY, log_step, parser, train_arrays


def main() -> None:
    """Train."""
    arguments = parser()
    arguments.add_argument("--steps-per-call", type=int, choices=(1, EVERY), default=1, help="of a tf.function")
    options = arguments.parse_args()
    strategy = create_strategy(options.threads)

    train_images, train_labels = train_arrays(options.arrays)

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(len(train_images))
        dataset = dataset.batch(context.get_per_replica_batch_size(options.global_batch), drop_remainder=True)
        return dataset.repeat().prefetch(tf.data.AUTOTUNE)

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))

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

    @tf.function
    def distributed_train_steps(iterator: tf.distribute.DistributedIterator, count: tf.Tensor) -> tf.Tensor:
        total_loss = 0.0
        for _ in tf.range(count):
            per_replica_losses = strategy.run(train_step, args=(next(iterator),))
            total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        return total_loss

    step, total_loss = 0, 0.0
    while step < options.steps:
        if options.steps_per_call == 1:
            count = 1
            total_loss += distributed_train_step(next(iterator))
        else:
            count = min(1 if step == 0 else EVERY - step % EVERY, options.steps - step)
            total_loss += distributed_train_steps(iterator, tf.constant(count))
        step += count
        log_step(step, options.steps)
    print(f"loss {total_loss / step}, accuracy {train_accuracy.result()}", file=sys.stderr)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # servers whose peers end at the same moment may hang in their teardown
