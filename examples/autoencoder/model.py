"""A variational autoencoder with a training step of its own, for `--loop fit`."""

import tensorflow as tf
from data import HIDDEN
from tensorflow import keras

layers, ops = keras.layers, keras.ops


class Sampling(layers.Layer):
    """Draws a point from the distribution of each example."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(0)

    def call(self, inputs):
        """Return `[B, HIDDEN]` from means and logarithms of variances."""
        mean, log_variance = inputs
        return mean + ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.seed_generator)


class Autoencoder(keras.Model):
    """Encodes an example as a distribution and decodes a point of it."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.total, self.divergence = keras.metrics.Mean("loss"), keras.metrics.Mean("divergence")

    def call(self, inputs):
        """Return the decoded mean, for evaluation and export."""
        return self.decoder(self.encoder(inputs)[0])

    def train_step(self, data):
        """Train on a replica's part of a batch; the optimizer adds up the gradients of all replicas."""
        inputs, _ = data
        with tf.GradientTape() as tape:
            mean, log_variance, point = self.encoder(inputs)
            error = ops.mean(ops.sum(ops.square(inputs - self.decoder(point)), axis=1))
            divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
            divergence = ops.mean(ops.sum(divergence, axis=1)) / 2
            loss = error + 0.1 * divergence
            scaled = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.divergence.update_state(divergence)
        return {metric.name: metric.result() for metric in (self.total, self.divergence)}


def model(feature_shape, num_outputs):
    """Return the network: curves `[B, VALUES]` to curves."""
    inputs, point = keras.Input(feature_shape), keras.Input((HIDDEN,))
    hidden = layers.Dense(32, "relu")(inputs)
    mean, log_variance = layers.Dense(HIDDEN)(hidden), layers.Dense(HIDDEN)(hidden)
    encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])])
    outputs = layers.Dense(num_outputs, "sigmoid")(layers.Dense(32, "relu")(point))
    return Autoencoder(encoder, keras.Model(point, outputs))
