"""A variable whose first value is a number or an array can be created without memory.

Defect: in a `StatelessScope` Keras refuses a first value that is not a function, such as those of the optimizer that a
model's `compile` creates.
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
    if isinstance(get_stateless_scope(), DeferringScope) and not isinstance(initializer, str | Callable):
        value = keras.ops.convert_to_tensor(initializer, dtype)
        initializer, shape, dtype = (lambda *_, **_options: value), value.shape, value.dtype
    _keras_init(variable, initializer, shape, dtype, *others, **options)


REPLACED = [(keras.Variable, "__init__", _init, {"defect": "while in a stateless scope"})]
