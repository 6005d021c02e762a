"""What is minimised and what is reported: a loss and a score for every example.

An example may have positions: those of a sequence, of an image, of both. Its loss and score are means over them. Where
a mask reaches the output, masked positions do not count, as in Keras: the mean is over the other positions of the whole
global batch, wherever its replicas and micro-batches hold them (`train/model/masks.py`).

Shapes: B batch, K outputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import masks
from train.named import Named
from train.settings import heads, references

PerExample = Callable[[Named, Named], tf.Tensor]
"""(labels `[B, ...]`, outputs `[B, ..., K]`) -> `[B] float32`; with several outputs, dictionaries of them."""

PerPosition = Callable[[Named, Named], tf.Tensor]
"""The same, but `[B, ...] float32`: a value for each position of an example, or one for all."""

DATA_LOSS = "data_loss"
"""The name of the score where outputs have no shape that can be compared with the labels: the loss without weights and
regularisation."""

Shapes = tuple[Named, Named]
"""Of one example's labels, and of the outputs for it; None for an output that is not a tensor."""


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
    """`accuracy`, `absolute_error` or `data_loss`: what metrics and summaries call the score; that of the first head,
    by whose name it begins, where there are several."""
    predicts_text: bool = False
    """Whether outputs are the next bytes of a text, so that the loss has a perplexity."""
    metrics: Mapping[str, PerExample] = field(default_factory=dict)
    """What evaluations report besides, by its name: of several outputs each head's loss and score, too."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """Each of several outputs; empty where one loss takes all of them."""

    @property
    def reported(self) -> dict[str, PerExample]:
        """What evaluations report the mean of, by its name."""
        return {"loss": self.loss, self.score_name: self.score, **self.metrics}

    @property
    def evaluated(self) -> list[str]:
        """The names of what evaluations report."""
        return [f"eval_{name}" for name in (*self.reported, *(["perplexity"] if self.predicts_text else []))]


def sparse_categorical_crossentropy(labels: tf.Tensor, logits_BK: tf.Tensor) -> tf.Tensor:
    """Return the cross entropy of logits `[B, ..., K]` with integer classes, `[B, ...] float32`."""
    labels = _one_each(labels, logits_BK)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits_BK, tf.float32))


def mean_squared_error(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return the squared error, averaged over the K outputs, `[B, ...] float32`."""
    return tf.reduce_mean(tf.square(_difference(labels, outputs_BK)), axis=-1)


def accuracy(labels: tf.Tensor, logits_BK: tf.Tensor) -> tf.Tensor:
    """Return 1 where the largest logit is that of the label, otherwise 0, `[B, ...] float32`."""
    labels = tf.cast(_one_each(labels, logits_BK), tf.int64)
    return tf.cast(tf.argmax(logits_BK, -1, tf.int64) == labels, tf.float32)


def absolute_error(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return the absolute error, averaged over the K outputs, `[B, ...] float32`."""
    return tf.reduce_mean(tf.abs(_difference(labels, outputs_BK)), axis=-1)


LOSSES: dict[str, PerPosition] = {loss.__name__: loss for loss in (sparse_categorical_crossentropy, mean_squared_error)}


def of(
    config: TrainConfig, *, classifies: Named, predicts_text: bool, shapes: Callable[[], Shapes] | None = None
) -> Objective:
    """Return the objective that a configuration describes, with the user's own metrics; for the rest see `build`.

    Args:
        shapes: called for a loss of the user's own, whose outputs may have any shape.

    Raises:
        UsageError: there is no such loss, or the loop cannot take it, or what should make the metrics does not.
    """
    known = shapes() if shapes and ":" in config.loss else None
    if isinstance(classifies, Mapping):
        objective = build_heads(config.loss, config.loss_weights, classifies, known)
        if config.loop == "fit" and not objective.heads:
            raise UsageError(f"--loss {config.loss} with --loop fit: Keras takes one loss a head; use --loop custom")
    elif "=" in config.loss or config.loss_weights:
        option = f"--loss {config.loss}" if "=" in config.loss else f"--loss-weights {config.loss_weights}"
        raise UsageError(f"{option}: the labels are one array, not a dictionary; give one loss, and no weights")
    else:
        objective = build(config.loss, classifies=classifies, predicts_text=predicts_text, shapes=known)
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
    return {name: _per_example(tf.function(function)) for name, function in functions.items()}


def build(loss: str, *, classifies: bool, predicts_text: bool = False, shapes: Shapes | None = None) -> Objective:
    """Return the objective with the loss called `loss`, built in or `package.module:function`.

    Args:
        loss: a key of `LOSSES`, or a reference to a function of the form `PerPosition`.
        classifies: whether the labels are classes: then the score is the accuracy.
        predicts_text: see `Objective`.
        shapes: None: those that a built-in loss requires.

    Raises:
        UsageError: there is no such function.
    """
    function = _loss(loss)
    return Objective(function, *(_score(classifies, shapes) or (function, DATA_LOSS)), predicts_text and classifies)


def build_heads(loss: str, weights: str, classifies: Mapping[str, bool], shapes: Shapes | None = None) -> Objective:
    """Return the objective of a model with several outputs: the sum of their losses, each times its weight.

    Args:
        loss: `head=loss` of every head, with commas; one that is built in, for all; or a reference to a function of
            the dictionaries of labels and outputs.
        weights: `head=number`, with commas; 1 for those that are not named.
        classifies: whether each head's labels are classes, in the order of the data: training logs the first one's
            score, evaluations report the loss and the score of each.
        shapes: as for `build`, by the head's name.

    Raises:
        UsageError: a head has no loss, or there is no such head or function.
    """
    named, weight_of = heads.losses(loss), heads.weights(weights)
    heads.check_known("--loss-weights", weight_of, classifies)
    scores = {head: _score(of_classes, _of_one(shapes, head)) for head, of_classes in classifies.items()}
    if "" in named and loss not in LOSSES:
        if weight_of:
            raise UsageError(f"--loss-weights {weights}: --loss {loss} takes all heads; weigh them there")
        return _scored(_loss(loss), {head: score for head, score in scores.items() if score})
    if "" in named:
        named = dict.fromkeys(classifies, loss)
    heads.check_known("--loss", named, classifies)
    for head, of_classes in classifies.items():
        if head not in named or (named[head] == "sparse_categorical_crossentropy" and not of_classes):
            example = ",".join(f"{name}={_usual_loss(whole)}" for name, whole in classifies.items())
            raise UsageError(f"--loss {loss}: no loss for the labels of {head!r}; expected one a head: {example}")
    losses = {head: _loss(named[head]) for head in classifies}
    known = {head: scores[head] or (of_head, DATA_LOSS) for head, of_head in losses.items()}
    each = {head: Head(of_head, weight_of.get(head, 1.0), *known[head]) for head, of_head in losses.items()}

    def total(labels: Named, outputs: Named) -> tf.Tensor:
        return tf.add_n([head.weight * head.loss(labels[name], outputs[name]) for name, head in each.items()])

    objective = _scored(total, known)
    reported = {f"{name}_loss": _of_head(head.loss, name) for name, head in each.items()}
    return dataclasses.replace(objective, metrics=reported | dict(objective.metrics), heads=each)


def _scored(total: PerExample, scores: Mapping[str, tuple[PerExample, str]]) -> Objective:
    """Return the objective that reports the scores of some heads, the first of which training logs."""
    named = {f"{head}_{name}": _of_head(score, head) for head, (score, name) in scores.items()} or {DATA_LOSS: total}
    (score_name, score), *others = named.items()
    return Objective(total, score, score_name, metrics=dict(others))


def _loss(loss: str) -> PerExample:
    if loss in LOSSES:
        return _per_example(LOSSES[loss])
    # The user's own may branch on tensors, which autograph converts: what calls it is not converted.
    function = tf.function(references.load("--loss", loss))

    def values(labels: Named, outputs: Named) -> tf.Tensor:
        found, mask = function(labels, outputs), masks.of(outputs)
        if mask is not None and getattr(getattr(found, "shape", None), "rank", None) == 1 < mask.shape.rank:
            raise UsageError(
                f"--loss {loss!r} gives one value an example, but the outputs have a mask {mask.shape}; return one "
                "value a position"
            )
        return found

    return _per_example(values)


def _of_one(shapes: Shapes | None, head: str) -> Shapes | None:
    if shapes is None:
        return None
    labels, outputs = shapes
    return labels[head], outputs.get(head) if isinstance(outputs, Mapping) else None


def _usual_loss(classifies: bool) -> str:
    return (sparse_categorical_crossentropy if classifies else mean_squared_error).__name__


def _score(classifies: bool, shapes: Shapes | None) -> tuple[PerExample, str] | None:
    """Return the score of outputs of some shape, and its name; None where none compares them with the labels."""
    labels, outputs = shapes or ((), (2,) if classifies else (1,))
    if not isinstance(outputs, tuple):
        return None
    if classifies and outputs[-1:] not in ((), (1,)) and outputs[:-1] in _one_for_each(labels):
        return _per_example(accuracy), "accuracy"
    return (_per_example(absolute_error), "absolute_error") if outputs in (labels or None, (*labels, 1)) else None


def _one_for_each(labels: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes that an example's labels may be given: an axis of size 1 at the end may be left out."""
    return [labels, labels[:-1]] if labels[-1:] == (1,) else [labels]


def check_outputs(config: TrainConfig, num_outputs: Named, shapes: Shapes) -> None:
    """Check that a model gives what a built-in loss compares with the labels; one of the user's own takes anything.

    Args:
        config: of the run.
        num_outputs: classes, or values to predict.
        shapes: of the labels and of what the model gives.

    Raises:
        UsageError: it does not.
    """
    labels, outputs = shapes
    losses = heads.losses(config.loss)
    if "" in losses and losses[""] not in LOSSES:
        if config.loop == "fit" and not isinstance(outputs, tuple):
            raise UsageError(
                f"--loop fit: --model {config.model!r} gives several outputs for one loss; use --loop custom"
            )
    elif not isinstance(labels, Mapping):
        _check_output(config.model, losses[""], num_outputs, labels, outputs, "")
    elif not isinstance(outputs, Mapping) or set(outputs) != set(labels):
        given = f"outputs called {', '.join(outputs)}" if isinstance(outputs, Mapping) else "one output"
        raise UsageError(
            f"--model {config.model!r} gives {given}; expected a dictionary of outputs called {', '.join(labels)}, as "
            "the labels are"
        )
    else:
        for head in labels:
            loss = losses.get(head) or losses.get("", "")
            _check_output(config.model, loss, num_outputs[head], labels[head], outputs[head], f" {head!r}")


def _check_output(model: str, loss: str, count: int, labels: tuple[int, ...], outputs: Any, which: str) -> None:
    if loss not in LOSSES:
        return
    expected = [(*shape, count) for shape in _one_for_each(labels)]
    if loss != "sparse_categorical_crossentropy":
        expected = [labels or (1,), (*labels, 1)]
    if outputs not in expected:
        given = str((None, *outputs)) if isinstance(outputs, tuple) else "several outputs"
        raise UsageError(
            f"--model {model!r} gives{which} {given}, expected {(None, *expected[0])}, as --loss {loss} compares it "
            f"with labels {(None, *labels)}; a loss of your own takes any outputs"
        )


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


def _per_example(function: PerPosition) -> PerExample:
    """Return a function whose values are averaged over the positions of an example that are not masked."""
    return lambda labels, outputs: masks.by_example(function(labels, outputs), masks.of(outputs))


def _one_each(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return labels without an axis of size 1 that the outputs have their K in."""
    return tf.squeeze(labels, -1) if labels.shape.rank == outputs_BK.shape.rank else labels


def _difference(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    outputs_BK = tf.cast(outputs_BK, tf.float32)
    labels = tf.cast(labels, tf.float32)
    return outputs_BK - (labels[..., tf.newaxis] if labels.shape.rank == outputs_BK.shape.rank - 1 else labels)
