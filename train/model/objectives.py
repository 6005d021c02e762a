"""Objectives: a loss to minimize and a score to report, each with a value for every example.

An example may have positions, such as those of a sequence or an image. Its loss and score are means over them. Where a
mask reaches the output, masked positions do not count, as in Keras: the mean is over the unmasked positions of the
whole global batch, for any replicas and micro-batches (`train/model/masks.py`).

Shapes: B batch, K outputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from cluster.system.errors import RunFailed, UsageError
from train.config import TrainConfig
from train.model import masks
from train.named import Named
from train.settings import parts, references

PerExample = Callable[[Named, Named], tf.Tensor]
"""(labels `[B, ...]`, outputs `[B, ..., K]`) -> `[B] float32`; with several outputs, both are dictionaries."""

PerPosition = Callable[[Named, Named], tf.Tensor]
"""Like `PerExample`, but returns `[B, ...] float32`: a value for each position of an example, or one for all."""

DATA_LOSS = "data_loss"
"""Name of the score if the outputs' shape cannot be compared with the labels: the loss without weights and
regularization."""

Shapes = tuple[Named, Named]
"""Shapes of one example's labels and outputs; None for an output that is not a tensor."""


@dataclass(frozen=True)
class Objective:
    """The loss and score of a model or one of its heads, per example, so that any batch can be averaged exactly."""

    loss: PerExample
    score: PerExample
    score_name: str
    """Name of the score in metrics and summaries: `accuracy`, `absolute_error` or `data_loss`. With several heads, it
    is the score of the first one, with the head's name as a prefix."""
    metrics: Mapping[str, PerExample] = field(default_factory=dict)
    """Further functions that evaluations report; with several outputs, also each head's loss and score."""
    heads: Mapping[str, Objective] = field(default_factory=dict)
    """The objective of each head, whose score name lacks the head's; empty if one loss takes all outputs."""
    weight: float = 1.0

    @property
    def reported(self) -> dict[str, PerExample]:
        """Functions whose means evaluations report."""
        return {"loss": self.loss, self.score_name: self.score, **self.metrics}


def sparse_categorical_crossentropy(labels: tf.Tensor, logits_BK: tf.Tensor) -> tf.Tensor:
    """Return the cross entropy of logits `[B, ..., K]` with integer classes, `[B, ...] float32`."""
    labels = _without_last_axis(labels, logits_BK)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits_BK, tf.float32))


def mean_squared_error(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return the squared error, averaged over the K outputs, `[B, ...] float32`."""
    return tf.reduce_mean(tf.square(_difference(labels, outputs_BK)), axis=-1)


def accuracy(labels: tf.Tensor, logits_BK: tf.Tensor) -> tf.Tensor:
    """Return 1 where the largest logit is that of the label, otherwise 0, `[B, ...] float32`."""
    labels = tf.cast(_without_last_axis(labels, logits_BK), tf.int64)
    return tf.cast(tf.argmax(logits_BK, -1, tf.int64) == labels, tf.float32)


def absolute_error(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Return the absolute error, averaged over the K outputs, `[B, ...] float32`."""
    return tf.reduce_mean(tf.abs(_difference(labels, outputs_BK)), axis=-1)


LOSSES: dict[str, PerPosition] = {loss.__name__: loss for loss in (sparse_categorical_crossentropy, mean_squared_error)}


def build_configured(
    config: TrainConfig, *, classifies: Named, shapes: Callable[[], Shapes] | None = None
) -> Objective:
    """Build the objective that a configuration describes, with the user's metrics; see `build_by_name`."""
    known = shapes() if shapes and ":" in config.loss else None
    if isinstance(classifies, Mapping):
        objective = build_for_heads(config.loss, config.loss_weights, classifies, known)
        if config.loop == "fit" and not objective.heads:
            raise UsageError(f"--loss {config.loss} with --loop fit: Keras takes one loss a head; use --loop custom")
    elif "=" in config.loss or config.loss_weights:
        option = f"--loss {config.loss}" if "=" in config.loss else f"--loss-weights {config.loss_weights}"
        raise UsageError(f"{option}: the labels are one array, not a dictionary; give one loss, and no weights")
    else:
        objective = build_by_name(config.loss, classifies=classifies, shapes=known)
    user_metrics = _user_metrics(config.metrics, taken=objective.reported)
    return dataclasses.replace(objective, metrics={**objective.metrics, **user_metrics})


def _user_metrics(reference: str, taken: Collection[str]) -> dict[str, PerExample]:
    if not reference:
        return {}
    returned = references.call_user_function("--metrics", reference, references.load_object("--metrics", reference))
    functions = returned if isinstance(returned, dict) else {}
    valid = [re.fullmatch(r"[a-z]\w*", str(name)) and callable(function) for name, function in functions.items()]
    if not valid or not all(valid):
        raise UsageError(
            f"--metrics {reference!r} returned {returned!r:.120}; "
            "expected a dictionary of functions by lower-case names"
        )
    if duplicates := [name for name in functions if name in taken]:
        raise UsageError(f"--metrics {reference!r}: {duplicates[0]!r} is reported anyway; give it another name")
    return {name: Averaged(_converted(function)) for name, function in functions.items()}


def build_by_name(loss: str, *, classifies: bool, shapes: Shapes | None = None) -> Objective:
    """Build the objective of a model with one output; raise UsageError if the loss needs classes, not values.

    `loss` is a key of `LOSSES`, or a reference `package.module:function` to a function of the form `PerPosition`. With
    `classifies` the labels are classes, and the score is the accuracy. A built-in loss needs no `shapes`.
    """
    function = _loss(loss)
    if loss == "sparse_categorical_crossentropy" and not classifies:
        raise UsageError(f"--loss {loss} takes classes, and the labels are not whole numbers; use {_usual_loss(False)}")
    return Objective(function, *(_score(classifies, shapes) or (function, DATA_LOSS)))


def build_for_heads(loss: str, weights: str, classifies: Mapping[str, bool], shapes: Shapes | None = None) -> Objective:
    """Build the objective of a model with several outputs: the weighted sum of their losses.

    `loss` is `head=loss` for every head, separated by commas, or a built-in loss for all heads, or a reference to a
    function of the dictionaries of labels and outputs; `weights` is `head=number`, 1 by default. `classifies` and
    `shapes` are by head, in the order of the data: training logs the score of the first head, evaluations report the
    loss and the score of each.
    """
    loss_names, loss_weights = parts.parse_losses(loss), parts.parse_weights(weights)
    parts.check_heads("--loss-weights", loss_weights, classifies)
    scores = {}
    for head, is_class in classifies.items():
        shapes_of_head = None
        if shapes is not None:
            labels, outputs = shapes
            shapes_of_head = labels[head], outputs.get(head) if isinstance(outputs, Mapping) else None
        scores[head] = _score(is_class, shapes_of_head)
    if "" in loss_names and loss not in LOSSES:
        if loss_weights:
            raise UsageError(f"--loss-weights {weights}: --loss {loss} takes all heads; weigh them there")
        return _scored(_loss(loss), {head: score for head, score in scores.items() if score})
    if "" in loss_names:
        loss_names = dict.fromkeys(classifies, loss)
    parts.check_heads("--loss", loss_names, classifies)
    for head, is_class in classifies.items():
        if head not in loss_names or (loss_names[head] == "sparse_categorical_crossentropy" and not is_class):
            example = ",".join(f"{name}={_usual_loss(is_class)}" for name, is_class in classifies.items())
            raise UsageError(f"--loss {loss}: no loss for the labels of {head!r}; expected one per head: {example}")
    losses = {head: _loss(loss_names[head]) for head in classifies}
    all_scores = {name: scores[name] or (head_loss, DATA_LOSS) for name, head_loss in losses.items()}
    all_heads = {
        name: Objective(head_loss, *all_scores[name], weight=loss_weights.get(name, 1.0))
        for name, head_loss in losses.items()
    }

    def total(labels: Named, outputs: Named) -> tf.Tensor:
        losses = [head.weight * head.loss(labels[name], outputs[name]) for name, head in all_heads.items()]
        return tf.reduce_sum(tf.stack(losses), 0)  # AddN's order depends on timing.

    objective = _scored(total, all_scores)
    reported = {f"{name}_loss": _of_head(head.loss, name) for name, head in all_heads.items()}
    return dataclasses.replace(objective, metrics=reported | dict(objective.metrics), heads=all_heads)


def _scored(total: PerExample, scores: Mapping[str, tuple[PerExample, str]]) -> Objective:
    named = {f"{head}_{name}": _of_head(score, head) for head, (score, name) in scores.items()} or {DATA_LOSS: total}
    (score_name, score), *others = named.items()
    return Objective(total, score, score_name, metrics=dict(others))


def _loss(loss: str) -> PerExample:
    if loss in LOSSES:
        return Averaged(LOSSES[loss])
    loaded = references.load_object("--loss", loss)
    if isinstance(loaded, type):
        raise UsageError(f"--loss {loss!r} is a class; expected a function, such as keras.losses:huber")
    function = _converted(loaded)

    def values(labels: Named, outputs: Named) -> tf.Tensor:
        losses, mask = function(labels, outputs), masks.mask_of(outputs)
        if mask is not None and getattr(getattr(losses, "shape", None), "rank", None) == 1 < mask.shape.rank:
            raise UsageError(
                f"--loss {loss!r} returns one value per example, but the outputs have a mask {mask.shape}; return "
                "one value per position"
            )
        return losses

    return Averaged(values)


def _converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function converted by autograph, as it may branch on tensors; its callers are not converted.

    Outputs would enter a `tf.function` without the logits of their softmax or sigmoid, which Keras attaches to them for
    its cross entropies, and values would leave it without their mask.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def _usual_loss(classifies: bool) -> str:
    return (sparse_categorical_crossentropy if classifies else mean_squared_error).__name__


def _score(classifies: bool, shapes: Shapes | None) -> tuple[PerExample, str] | None:
    """Return the score for outputs of a shape, and its name; None if no score can compare them with the labels."""
    labels, outputs = shapes or ((), (2,) if classifies else (1,))
    if not isinstance(outputs, tuple):
        return None
    if classifies and outputs[-1:] not in ((), (1,)) and outputs[:-1] in _label_shapes(labels):
        return Averaged(accuracy), "accuracy"
    return (Averaged(absolute_error), "absolute_error") if outputs in (labels or None, (*labels, 1)) else None


def _label_shapes(labels: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the possible shapes of an example's labels: a last axis of size 1 may be missing."""
    return [labels, labels[:-1]] if labels[-1:] == (1,) else [labels]


def explain(error: Exception) -> RunFailed | None:
    """Translate TensorFlow's error about labels that the outputs have no class for; None for other errors."""
    text = str(error)
    # As deterministic operations compute the loss.
    gathered = "SparseSoftmaxCrossEntropyWithLogits" in text and re.search(r"\d is (not in|out of range) \[", text)
    if gathered or "Received a label value" in text:
        return RunFailed("a label is not a class of the model's outputs, from 0 on; correct it, or --num-outputs")
    return None


def check_outputs(config: TrainConfig, num_outputs: Named, shapes: Shapes) -> None:
    """Check the shape of a model's outputs for a built-in loss; a user's loss takes any outputs."""
    labels, outputs = shapes
    losses = parts.parse_losses(config.loss)
    if "" in losses and losses[""] not in LOSSES:
        if config.loop == "fit" and not isinstance(outputs, tuple):
            raise UsageError(
                f"--loop fit: --model {config.model!r} has several outputs for one loss; use --loop custom"
            )
    elif not isinstance(labels, Mapping):
        _check_output(config.model, losses[""], num_outputs, labels, outputs, "")
    elif not isinstance(outputs, Mapping) or set(outputs) != set(labels):
        actual = f"outputs called {', '.join(outputs)}" if isinstance(outputs, Mapping) else "one output"
        raise UsageError(
            f"--model {config.model!r} has {actual}; expected a dictionary of outputs called {', '.join(labels)}, like "
            "the labels"
        )
    else:
        for head in labels:
            loss = losses.get(head) or losses.get("", "")
            _check_output(config.model, loss, num_outputs[head], labels[head], outputs[head], f" {head!r}")


def _check_output(model: str, loss: str, count: int, labels: tuple[int, ...], outputs: Any, which: str) -> None:
    if loss not in LOSSES:
        return
    expected = [(*shape, count) for shape in _label_shapes(labels)]
    if loss != "sparse_categorical_crossentropy":
        expected = [labels or (1,), (*labels, 1)]
    if outputs not in expected:
        actual = str((None, *outputs)) if isinstance(outputs, tuple) else "several outputs"
        raise UsageError(
            f"--model {model!r} returns{which} {actual}, expected {(None, *expected[0])}, as --loss {loss} compares "
            f"it with labels {(None, *labels)}; your own loss may take any outputs"
        )


def _of_head(function: PerExample, head: str) -> PerExample:
    return lambda labels, outputs: function(labels[head], outputs[head])


def global_mean(values_B: tf.Tensor, weights_B: tf.Tensor, global_batch: int) -> tf.Tensor:
    """Return a replica's share of the mean over the global batch, a scalar.

    The shares of all replicas, which may have different numbers of examples, add up to
    `sum(weights * values) / global_batch`, which one device would compute for the whole batch
    (https://www.tensorflow.org/tutorials/distribute/custom_training#define_the_loss_function).
    """
    return tf.nn.compute_average_loss(values_B, sample_weight=weights_B, global_batch_size=global_batch)


@dataclass(frozen=True)
class Averaged:
    """A function averaged over the unmasked positions of each example, `PerExample`."""

    values: PerPosition

    def __call__(self, labels: Named, outputs: Named) -> tf.Tensor:
        """Return the averages `[B] float32`; as in Keras, values may have any type, such as bool."""
        values = self.values(labels, outputs)
        return masks.average_by_example(tf.cast(values, tf.float32), masks.of_values(values, outputs))


def _without_last_axis(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    """Remove the labels' last axis of size 1, which the outputs have for K."""
    return tf.squeeze(labels, -1) if labels.shape.rank == outputs_BK.shape.rank else labels


def _difference(labels: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    outputs_BK = tf.cast(outputs_BK, tf.float32)
    labels = tf.cast(labels, tf.float32)
    return outputs_BK - (labels[..., tf.newaxis] if labels.shape.rank == outputs_BK.shape.rank - 1 else labels)
