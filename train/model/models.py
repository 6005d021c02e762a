"""Builds the model that a configuration names."""

import collections
import contextlib
import fnmatch
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from keras.src.backend.common import global_state  # has no public name
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR  # has no public name
from tensorflow import keras  # Keras 3, or tf_keras if `--loop fit` needs it

from cluster.system.errors import UsageError, nearest
from train import named
from train.config import MODELS, TrainConfig
from train.model import architectures, input_types
from train.named import Named
from train.settings import references

_COUNTS: dict[str, dict[str, int]] = {}
"""Keras's counts of the layers of each class before the first build of a model."""


def build_configured(config: TrainConfig, feature_shape: Named, num_outputs: Named) -> keras.Model:
    """Build the model that a configuration describes; see `build_by_name`.

    Each build draws the same numbers, so that constants drawn by the user's function are those of the training in an
    evaluation or an export.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    keras.utils.set_random_seed(config.seed)  # the build begins with a new generator
    size, sizes = config.transformer, dict[str, int]()
    if config.model == "transformer_lm":
        sizes = {"layers": size.layers, "width": size.width, "heads": size.heads}
    named_again = config.freeze or config.optimizer.no_decay
    with _names_of_first_build(config.model) if named_again else contextlib.nullcontext():
        try:
            model = build_by_name(config.model, feature_shape, num_outputs, **sizes)
        finally:
            if generator is not None:  # traced steps draw from it
                global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    if keras.backend.floatx() != "float32":  # the type of data, losses and gradients
        raise UsageError(
            f"--model {config.model!r}: set_floatx({keras.backend.floatx()!r}): expected float32; give single layers "
            "another dtype"
        )
    if config.loop == "custom" and (method := find_override(model)):
        raise UsageError(
            f"--model {config.model!r}: {type(model).__name__} overrides {method}, which --loop custom does not "
            "call; use --loop fit"
        )
    if config.precision != "fp16" and model.dtype_policy.name == "mixed_float16":  # Keras's `fit` scales its loss
        raise UsageError(
            f"--model {config.model!r} sets the policy mixed_float16, which needs --precision fp16 to scale the loss; "
            "add it, or use mixed_bfloat16"
        )
    if float8 := [weight.path for weight in model.weights if getattr(weight, "overwrite_with_gradient", False)]:
        raise UsageError(
            f"--model {config.model!r}: {float8[0]} belongs to a layer in float8, whose scales Keras keeps as "
            "gradients; use another dtype for that layer"
        )
    recurrent = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN)]
    if stateful := [layer.name for layer in recurrent if layer.stateful]:
        raise UsageError(
            f"--model {config.model!r}: the layer {stateful[0]!r} is stateful, and replicas, micro-batches and "
            "evaluations have batches of different sizes; leave stateful=True out"
        )
    if config.loop == "fit":
        try:
            inspect.signature(model.compile).bind(None, loss=None, loss_weights=None, metrics=None, jit_compile=False)
        except TypeError as error:
            raise UsageError(
                f"--model {config.model!r}: --loop fit calls compile(optimizer, loss=, loss_weights=, metrics=, "
                f"jit_compile=), and that of {type(model).__name__} does not take them ({error}); call fit in your own "
                "script, --script"
            ) from None
    freeze_layers(model, config.freeze)
    return model


def find_override(model: keras.Model) -> str:
    """Return the name of a method of Keras's step that a model overrides; empty if it overrides none."""
    methods = ("train_step", "compute_loss")
    return next((name for name in methods if getattr(type(model), name) is not getattr(keras.Model, name)), "")


def freeze_layers(model: keras.Model, names: str) -> None:
    """Exclude layers with these names or patterns, separated by commas, from training."""
    layers = list(model._flatten_layers(include_self=False))  # nested ones too; several may have the same name
    for pattern in filter(None, (part.strip() for part in names.split(","))):
        if not (matching := [layer for layer in layers if fnmatch.fnmatch(layer.name, pattern)]):
            raise UsageError(f"--freeze {pattern!r}{nearest(pattern, [layer.name for layer in layers])}")
        for layer in matching:
            layer.trainable = False
    if names and not model.trainable_variables:
        raise UsageError(f"--freeze {names!r}: no layer is left to train; leave some out")


def build_by_name(name: str, feature_shape: Named, num_outputs: Named, **options: Any) -> keras.Model:
    """Return the model called `name`: a key of `train.config.MODELS`, or `package.module:function`."""
    function = getattr(architectures, name) if name in MODELS else references.load_object("--model", name)
    build = functools.partial(function, **options)
    model = references.call_user_function("--model", name, build, feature_shape, num_outputs)
    if not isinstance(model, keras.Model):
        expected = f"a {keras.Model.__module__.partition('.')[0]} model"
        raise UsageError(
            f"--model {name!r} returned {type(model).__module__}.{type(model).__name__}, expected {expected}; "
            "use `from tensorflow import keras`, which is the Keras that the chosen loop needs"
        )
    references.call_user_function("--model", name, call_symbolically, model, feature_shape)
    return model


@contextlib.contextmanager
def _names_of_first_build(name: str) -> Iterator[None]:
    """Restore Keras's layer counts from before this model's first build, so that options find the same layer names."""
    counts = global_state.get_global_attribute("object_name_uids", collections.defaultdict(int), set_to_default=True)
    first = _COUNTS.setdefault(name, dict(counts))
    others = {kind: count for kind, count in counts.items() if count != first.get(kind)}
    counts.clear()
    counts.update(first)
    try:
        yield
    finally:
        counts.update({kind: max(count, counts[kind]) for kind, count in others.items()})


def call_symbolically(model: keras.Model, feature_shape: Named) -> Any:
    """Call a model on symbolic tensors and return its outputs.

    This also creates the variables of the layers of a subclassed model, which Keras's `build` does not.
    """
    types = input_types.input_dtypes(model, feature_shape)
    return model(named.each(lambda shape, dtype: keras.Input(shape, dtype=dtype), feature_shape, types))


def output_shapes(outputs: Any) -> Named:
    """Return the shapes of outputs of `call_symbolically` for one example; None for an output that is not a tensor."""

    def shape(output: Any) -> tuple[int, ...] | None:
        return None if isinstance(output, list | tuple | Mapping) else tuple(output.shape[1:])

    return named.each(shape, outputs)


def example_shapes(model: keras.Model, source: Any) -> tuple[Named, Named]:
    """Return the shapes of one example's labels in a source, and of its outputs."""
    return source.label_shape, output_shapes(call_symbolically(model, source.feature_shape))
