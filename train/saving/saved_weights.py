"""The weights of a checkpoint for evaluation and export, and the hash of a model's weights."""

import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.system.errors import UsageError
from train.config import TrainConfig
from train.model import optimizers
from train.saving.trees import Mirror, all_variables, as_saved, parts_of_model


def load_evaluated(config: TrainConfig, model: keras.Model, prefix: str, as_trained: keras.Model | None = None) -> None:
    """Load the weights of a checkpoint into a model, or their averages if the run evaluates those.

    The model has plain variables. `as_trained` is the model in the precision of the training, if that differs: a
    checkpoint identifies layers by number, and Keras counts casts as well. Raises tf.errors.OpError or OSError if the
    files cannot be read, and UsageError if they are those of another model.
    """
    load_trained(model, prefix, as_trained)
    load_averages(config, model, prefix)


def load_trained(model: keras.Model, prefix: str, as_trained: keras.Model | None = None) -> None:
    """Load the trained weights of a checkpoint into a model; see `load_evaluated`."""
    parts = parts_of_model(as_trained or model)
    parts.pop("own_optimizers", None)
    checkpoint = tf.train.Checkpoint(**parts)
    if as_trained:
        pairs = zip(all_variables(as_trained), all_variables(model), strict=True)
        variables = {id(saved): variable for saved, variable in pairs}
        checkpoint = Mirror(checkpoint, lambda saved: variables.get(id(saved))).checkpoint
    try:
        checkpoint.read(prefix).assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UsageError(f"{prefix} is that of another model: {reason}; undo the change to your model") from None


def load_averages(config: TrainConfig, model: keras.Model, prefix: str) -> None:
    """Load the averages of the weights into a model, if the run evaluates those; see `load_evaluated`."""
    if not (config.optimizer.ema_evaluate and (config.optimizer.ema or config.optimizer.own)):
        return
    optimizer = optimizers.build_for_model(config, model)
    if means := optimizers.find_averages(optimizer):
        saved = as_saved(optimizer, prefix)
        tf.train.Checkpoint(optimizer=saved).read(prefix).assert_existing_objects_matched().expect_partial()
        for variable, mean in zip(model.trainable_variables, means, strict=True):
            variable.assign(mean)


def read_values(model: keras.Model) -> list[np.ndarray]:
    """Return the values of a model's weights and state, for `assign_values`; all tasks call it."""
    return [np.asarray(tf.convert_to_tensor(variable)) for variable in all_variables(model)]


def assign_values(model: keras.Model, values: Sequence[np.ndarray]) -> None:
    """Assign the values of a model to another build of it."""
    for variable, value in zip(all_variables(model), values, strict=True):
        variable.assign(value)


def weights_sha256(model: keras.Model) -> str:
    """Return the hash of the trainable variables' bytes in creation order."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()
