"""The optimizer that a configuration describes, and its gradient policy."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model.gradients import GradientPolicy, LossScale
from train.saving.trees import has_value
from train.settings import references

CLASSES = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb", "lion": "Lion", "sgd": "SGD"}


class RateSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that grows to its peak and then follows one of Keras's schedules."""

    def __init__(self, config: TrainConfig, total_steps: int) -> None:
        settings, peak, warmup = config.optimizer, config.learning_rate, config.warmup_steps
        schedules = keras.optimizers.schedules
        steps = settings.decay_steps or max(1, total_steps - warmup)
        self._settings = {"peak": peak, "warmup_steps": warmup, "schedule": settings.schedule, "decay_steps": steps}
        self._warmup_steps = warmup
        self._growth = schedules.PolynomialDecay(peak / warmup, warmup, peak) if warmup else None
        self._decay: Any = None
        if settings.schedule == "cosine":
            self._decay = schedules.CosineDecay(peak, steps, alpha=settings.end_share)
        elif settings.schedule == "linear":
            self._decay = schedules.PolynomialDecay(peak, steps, peak * settings.end_share)

    def __call__(self, step: Any) -> Any:
        if self._decay is None:
            return self._growth(step) if self._growth else tf.constant(self._settings["peak"], tf.float32)
        done = tf.cast(step, tf.float32)
        after = self._decay(tf.maximum(done - self._warmup_steps, 0.0))
        return tf.where(done < self._warmup_steps, self._growth(step), after) if self._growth else after

    def get_config(self) -> dict[str, Any]:
        return dict(self._settings)


def build_optimizer(config: TrainConfig, total_steps: int = 1) -> keras.optimizers.Optimizer:
    """Build the optimizer, whose learning rate decays over `total_steps`; call it inside the strategy's scope."""
    settings = config.optimizer
    rate = config.learning_rate if config.callbacks_set_rate else RateSchedule(config, total_steps)
    if settings.own:
        name = settings.name
        optimizer = references.call_user_function(
            "--optimizer.name", name, references.load_object("--optimizer.name", name), rate
        )
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            expected = f"a {keras.Model.__module__.partition('.')[0]} optimizer"
            raise UsageError(
                f"--optimizer.name {name!r} returned {type(optimizer).__module__}.{type(optimizer).__name__}, expected "
                f"{expected}; use `from tensorflow import keras`, which is the Keras that the chosen loop needs"
            )
        if hasattr(optimizer, "inner_optimizer"):  # it divides gradients by a scale that no loss is multiplied by
            raise UsageError(
                f"--optimizer.name {name!r} returned a {type(optimizer).__name__}; return the optimizer inside it, and "
                "scale losses by --precision fp16"
            )
        parts = [part for value in vars(optimizer).values() for part in (value if isinstance(value, list) else [value])]
        if any(isinstance(part, keras.optimizers.Optimizer) for part in parts):  # the checkpoint would miss their state
            raise UsageError(
                f"--optimizer.name {name!r} returned a {type(optimizer).__name__} of other optimizers; return a single "
                "one, or use --loop fit with a train_step that applies several"
            )
        # A schedule that was given another one as its first rate fails when it is called.
        references.call_user_function("the rate of --optimizer.name", name, lambda: optimizer.learning_rate)
        optimizer.loss_scale_factor = None  # would divide gradients by a factor of the loss that only Keras's fit uses
    else:
        options: dict[str, Any] = {}
        if settings.weight_decay is not None:
            options["weight_decay"] = settings.weight_decay or (0.0 if settings.name == "adamw" else None)
        if settings.ema:
            options |= {"use_ema": True, "ema_momentum": settings.ema, "ema_overwrite_frequency": None}
        if settings.name == "sgd":
            options |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
        make = getattr(keras.optimizers, CLASSES[settings.name], None)
        if make is None:
            raise UsageError(f"--optimizer.name {settings.name}: tf_keras has no such optimizer; use --loop custom")
        optimizer = make(rate, **options)
    # At the end of each call of `fit` Keras would replace the weights by their averages.
    optimizer.finalize_variable_values = lambda *_variables: None
    return optimizer


def build_for_model(
    config: TrainConfig,
    model: keras.Model,
    total_steps: int = 1,
    make: Callable[[keras.optimizers.Optimizer, keras.Model], None] | None = None,
) -> keras.optimizers.Optimizer:
    """Build the optimizer and its variables, with `make` if given; call it inside the strategy's scope."""
    optimizer, variables = build_optimizer(config, total_steps), model.trainable_variables
    if patterns := [part.strip() for part in config.optimizer.no_decay.split(",") if part.strip()]:
        paths = [getattr(variable, "path", variable.name) for variable in variables]
        pairs = zip(variables, paths, strict=True)
        kept = [variable for variable, path in pairs if re.search("|".join(patterns), path)]
        if not kept:
            raise UsageError(
                f"--optimizer.no-decay {config.optimizer.no_decay!r}: no weight has such a path; "
                f"they are {', '.join(paths)[:300]}"
            )
        optimizer.exclude_from_weight_decay(var_list=kept)
    if make:
        make(optimizer, model)
    else:
        optimizer.build(variables)  # otherwise its slot variables would be on the chief
    for average in find_averages(optimizer):
        value = getattr(average, "value", average)
        if hasattr(value, "_aggregation"):  # without one no replica may write them
            value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return optimizer


def check_replicas(optimizer: keras.optimizers.Optimizer, name: str, replicas: int) -> None:
    """Check that an optimizer works on several replicas, where Keras's conditional assignments do not."""
    for option, instead in (
        ("gradient_accumulation_steps", "use --micro-batches"),
        ("ema_overwrite_frequency", "evaluations and exports use the averages without it"),
    ):
        if replicas > 1 and (value := getattr(optimizer, option, None)):
            raise UsageError(f"--optimizer.name {name}: {option}={value} on {replicas} replicas; {instead}")


def find_averages(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return an optimizer's moving averages of the weights, in their order."""
    if not getattr(optimizer, "use_ema", False):
        return []
    return list(optimizer._model_variables_moving_average)


@contextlib.contextmanager
def with_averages(config: TrainConfig, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Replace a task's weights with their averages inside, if the configuration evaluates those; all tasks call it."""
    means = find_averages(optimizer) if config.optimizer.ema_evaluate else []
    # The weights that the optimizer was built for: callbacks may have frozen some since.
    averaged_weights = getattr(optimizer, "_trainable_variables", model.trainable_variables)
    pairs = list(zip(averaged_weights, means, strict=True)) if means else []
    pairs = [(variable, mean) for variable, mean in pairs if has_value(variable)]
    before = [variable.numpy() for variable, _ in pairs]
    for variable, mean in pairs:
        variable.assign(mean.numpy())
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, before, strict=True):
            variable.assign(value)


def build_policy(config: TrainConfig, optimizer: keras.optimizers.Optimizer) -> GradientPolicy:
    """Build the gradient policy of an optimizer; call it inside the strategy's scope."""
    return GradientPolicy(optimizer, config.optimizer.clip_norm, LossScale() if config.precision == "fp16" else None)
