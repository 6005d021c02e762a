"""A variable whose first value is a number or an array can be created without memory.

Defect: in a `StatelessScope` Keras refuses a first value that is not a function, such as those of the optimizer that a
model's `compile` creates. It calls functions only later, when what they draw from a shared generator is another number.
Versions: Keras 3.15.1.
Test: tests/unit/train/pipeline/test_stage_variables.py::test_a_compiled_model_is_built_without_memory_and_exported
Not applied: outside of `DeferringScope`, as a layer that creates variables in each call is to be refused.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common.stateless_scope import get_stateless_scope  # has no public name

_keras_init = keras.Variable.__init__


class DeferringScope(keras.StatelessScope):
    """Scope in which a model is built without memory for its variables."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)


def _init(variable: Any, initializer: Any, shape: Any = None, dtype: Any = None, *others: Any, **options: Any) -> None:
    if isinstance(get_stateless_scope(), DeferringScope) and not isinstance(initializer, str):
        value = None
        if not callable(initializer):
            value = keras.ops.convert_to_tensor(initializer, dtype)
            shape, dtype = value.shape, value.dtype
        elif shape is not None and not _draws_alone(initializer):
            value = initializer(shape, dtype=keras.backend.standardize_dtype(dtype))
        initializer = initializer if value is None else lambda *_, **_options: value
    _keras_init(variable, initializer, shape, dtype, *others, **options)


def _draws_alone(initializer: Callable[..., Any]) -> bool:
    """Whether an initializer is one of Keras with a separate seed, so that it may be called at any time, or never."""
    shared = isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)
    return not shared and type(initializer).__module__.startswith("keras.")


REPLACED = [(keras.Variable, "__init__", _init, {"defect": "while in a stateless scope"})]
