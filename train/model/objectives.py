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
from train.named import Named
from train.settings import heads, references

PerExample = Callable[[Named, Named], tf.Tensor]
"""(labels `[B]` or `[B, K]`, outputs `[B, K]`) -> `[B] float32`; with several outputs, dictionaries of them."""


@dataclass(frozen=True)
class Head:
    """What is minimised and reported of one of several outputs: functions of its own labels and outputs."""

    loss: PerExample
    weight: float
    """What its loss is multiplied by."""
    score: PerExample
    score_name: str
    """Of the score, without the head's."""


@dataclass(frozen=True)
class Objective:
    """A loss and a score, each a function of one example, so that any batch can be averaged exactly."""

    loss: PerExample
    score: PerExample
    score_name: str
    """`accuracy` or `absolute_error`: what metrics and summaries call the score; that of the first head, by whose name
    it begins, where there are several."""
    predicts_text: bool = False
    """Whether outputs are the next bytes of a text, so that the loss has a perplexity."""
    metrics: Mapping[str, PerExample] = field(default_factory=dict)
    """What evaluations report besides, by its name: of several outputs each head's loss and score, too."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """Each of several outputs; empty where one loss takes all of them."""

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


def of(config: TrainConfig, *, classifies: Named, predicts_text: bool) -> Objective:
    """Return the objective that a configuration describes, with the user's own metrics; for the rest see `build`.

    Raises:
        UsageError: there is no such loss, or the loop cannot take it, or what should make the metrics does not.
    """
    if isinstance(classifies, Mapping):
        objective = build_heads(config.loss, config.loss_weights, classifies)
        if config.loop == "fit" and not objective.heads:
            raise UsageError(f"--loss {config.loss} with --loop fit: Keras takes one loss a head; use --loop custom")
    elif "=" in config.loss or config.loss_weights:
        option = f"--loss {config.loss}" if "=" in config.loss else f"--loss-weights {config.loss_weights}"
        raise UsageError(f"{option}: the labels are one array, not a dictionary; give one loss, and no weights")
    else:
        objective = build(config.loss, classifies=classifies, predicts_text=predicts_text)
    own = _own_metrics(config.metrics, taken=objective.evaluated)
    return dataclasses.replace(objective, metrics={**objective.metrics, **own})


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
    return Objective(_loss(loss), *_score(classifies), predicts_text and classifies)


def build_heads(loss: str, weights: str, classifies: Mapping[str, bool]) -> Objective:
    """Return the objective of a model with several outputs: the sum of their losses, each times its weight.

    Args:
        loss: `head=loss` of every head, with commas; one that is built in, for all; or a reference to a function of
            the dictionaries of labels and outputs.
        weights: `head=number`, with commas; 1 for those that are not named.
        classifies: whether each head's labels are classes, in the order of the data: training logs the first one's
            score, evaluations report the loss and the score of each.

    Raises:
        UsageError: a head has no loss, or there is no such head or function.
    """
    named, weight_of = heads.losses(loss), heads.weights(weights)
    heads.check_known("--loss-weights", weight_of, classifies)
    scores = {head: _score(of_classes) for head, of_classes in classifies.items()}
    first, score_name = next((head, f"{head}_{name}") for head, (_, name) in scores.items())
    metrics = {f"{head}_{name}": _of_head(score, head) for head, (score, name) in scores.items() if head != first}
    score = _of_head(scores[first][0], first)
    if "" in named and loss not in LOSSES:
        if weight_of:
            raise UsageError(f"--loss-weights {weights}: --loss {loss} takes all heads; weigh them there")
        return Objective(_loss(loss), score, score_name, metrics=metrics)
    if "" in named:
        named = dict.fromkeys(classifies, loss)
    heads.check_known("--loss", named, classifies)
    for head, of_classes in classifies.items():
        if head not in named or (named[head] == "sparse_categorical_crossentropy" and not of_classes):
            example = ",".join(f"{name}={_usual_loss(whole)}" for name, whole in classifies.items())
            raise UsageError(f"--loss {loss}: no loss for the labels of {head!r}; expected one a head: {example}")
    each = {head: Head(_loss(named[head]), weight_of.get(head, 1.0), *scores[head]) for head in classifies}

    def total(labels: Named, outputs: Named) -> tf.Tensor:
        return tf.add_n([head.weight * head.loss(labels[name], outputs[name]) for name, head in each.items()])

    losses = {f"{name}_loss": _of_head(head.loss, name) for name, head in each.items()}
    return Objective(total, score, score_name, metrics=losses | metrics, heads=each)


def _loss(loss: str) -> PerExample:
    # Somebody's own may branch on tensors, which autograph converts: what calls it is not converted.
    return LOSSES[loss] if loss in LOSSES else tf.function(references.load("--loss", loss))


def _usual_loss(classifies: bool) -> str:
    return (sparse_categorical_crossentropy if classifies else mean_squared_error).__name__


def _score(classifies: bool) -> tuple[PerExample, str]:
    return (accuracy, "accuracy") if classifies else (absolute_error, "absolute_error")


def _of_head(function: PerExample, head: str) -> PerExample:
    return lambda labels, outputs: function(labels[head], outputs[head])


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
