"""What is minimised and what is reported: a loss and a score for every example.

Shapes: B batch, K outputs; of sequences T positions, over which an example's loss and score are averaged.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from cluster.errors import UsageError
from train.config import TrainConfig
from train.settings import references

PerExample = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(labels `[B]` or `[B, K]`, outputs `[B, K]`) -> `[B] float32`."""


@dataclass(frozen=True)
class Objective:
    """A loss and a score, each a function of one example, so that any batch can be averaged exactly."""

    loss: PerExample
    score: PerExample
    score_name: str
    """`accuracy` or `absolute_error`: what metrics and summaries call the score."""
    predicts_text: bool = False
    """Whether outputs are the next bytes of a text, so that the loss has a perplexity."""
    metrics: Mapping[str, PerExample] = field(default_factory=dict)
    """What evaluations report besides, by its name."""

    @property
    def evaluated(self) -> list[str]:
        """The names of what evaluations report."""
        names = ["loss", self.score_name, *(["perplexity"] if self.predicts_text else []), *self.metrics]
        return [f"eval_{name}" for name in names]


def sparse_categorical_crossentropy(labels_B: tf.Tensor, logits_BK: tf.Tensor) -> tf.Tensor:
    """Return the cross entropy of logits with integer classes, `[B] float32`; of sequences `[B, T]` and `[B, T, K]`."""
    return _by_example(tf.nn.sparse_softmax_cross_entropy_with_logits(labels_B, tf.cast(logits_BK, tf.float32)))


def mean_squared_error(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return the squared error of each example, averaged over its K outputs, `[B] float32`."""
    return tf.reduce_mean(tf.square(_difference(labels, outputs_BK)), axis=-1)


def accuracy(labels_B: tf.Tensor, logits_BK: tf.Tensor) -> tf.Tensor:
    """Return 1 where the largest logit is that of the label, otherwise 0, `[B] float32`."""
    return _by_example(tf.cast(tf.argmax(logits_BK, -1, tf.int64) == tf.cast(labels_B, tf.int64), tf.float32))


def absolute_error(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return the absolute error of each example, averaged over its K outputs, `[B] float32`."""
    return tf.reduce_mean(tf.abs(_difference(labels, outputs_BK)), axis=-1)


LOSSES: dict[str, PerExample] = {loss.__name__: loss for loss in (sparse_categorical_crossentropy, mean_squared_error)}


def of(config: TrainConfig, *, classifies: bool, predicts_text: bool) -> Objective:
    """Return the objective that a configuration describes, with the user's own metrics; for the rest see `build`.

    Raises:
        UsageError: there is no such loss, or what should make the metrics does not.
    """
    objective = build(config.loss, classifies=classifies, predicts_text=predicts_text)
    return dataclasses.replace(objective, metrics=_own_metrics(config.metrics, taken=objective.evaluated))


def _own_metrics(reference: str, taken: Sequence[str]) -> dict[str, PerExample]:
    """Return the user's own metrics: a function of theirs returns them, by their names."""
    if not reference:
        return {}
    made = references.call("--metrics", reference, references.load("--metrics", reference))
    functions = made if isinstance(made, dict) else {}
    good = [re.fullmatch(r"[a-z]\w*", str(name)) and callable(function) for name, function in functions.items()]
    if not good or not all(good):
        raise UsageError(
            f"--metrics {reference!r} returned {made!r:.120}; expected a dictionary of functions by lower-case names"
        )
    if both := [name for name in functions if f"eval_{name}" in taken]:
        raise UsageError(f"--metrics {reference!r}: {both[0]!r} is reported anyway; give it another name")
    return {name: tf.function(function) for name, function in functions.items()}


def build(loss: str, *, classifies: bool, predicts_text: bool = False) -> Objective:
    """Return the objective with the loss called `loss`, built in or `package.module:function`.

    Args:
        loss: a key of `LOSSES`, or a reference to a function of the form `PerExample`.
        classifies: whether the labels are classes: then the score is the accuracy.
        predicts_text: see `Objective`.

    Raises:
        UsageError: there is no such function.
    """
    # Somebody's own may branch on tensors, which autograph converts: what calls it is not converted.
    function = LOSSES[loss] if loss in LOSSES else tf.function(references.load("--loss", loss))
    if classifies:
        return Objective(function, accuracy, "accuracy", predicts_text)
    return Objective(function, absolute_error, "absolute_error")


def global_mean(values_B: tf.Tensor, weights_B: tf.Tensor, global_batch: int) -> tf.Tensor:
    """Return a replica's share of the mean over the global batch, a scalar.

    Summed over all replicas, however unequally the examples lie on them, the shares are
    `sum(weights * values) / global_batch`: what one device would compute for the whole batch
    (https://www.tensorflow.org/tutorials/distribute/custom_training#define_the_loss_function).

    Args:
        values_B: losses or scores of this replica's examples.
        weights_B: their weights; 0 for padding.
        global_batch: examples in the batch over all replicas, padding not counted.
    """
    return tf.nn.compute_average_loss(values_B, sample_weight=weights_B, global_batch_size=global_batch)


def _by_example(values: tf.Tensor) -> tf.Tensor:
    """Return values averaged over the positions of a sequence, where examples are sequences."""
    rank = values.shape.rank
    return values if rank in (None, 1) else tf.reduce_mean(values, axis=list(range(1, rank)))


def _difference(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    outputs_BK = tf.cast(outputs_BK, tf.float32)
    labels = tf.cast(labels, tf.float32)
    return outputs_BK - (labels[:, tf.newaxis] if labels.shape.rank == 1 else labels)
