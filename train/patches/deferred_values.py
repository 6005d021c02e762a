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
from keras.src.backend.common import global_state  # has no public name
from keras.src.backend.common.stateless_scope import get_stateless_scope  # has no public name

_keras_init, _keras_exit = keras.Variable.__init__, keras.StatelessScope.__exit__


class DeferringScope(keras.StatelessScope):
    """Scope in which a model is built without memory for its variables."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)


def _init(variable: Any, initializer: Any, shape: Any = None, dtype: Any = None, *others: Any, **options: Any) -> None:
    deferring = isinstance(get_stateless_scope(), DeferringScope)
    if deferring and not isinstance(initializer, str | Callable):
        value = keras.ops.convert_to_tensor(initializer, dtype)
        initializer, shape, dtype = (lambda *_, **_options: value), value.shape, value.dtype
    _keras_init(variable, initializer, shape, dtype, *others, **options)
    if deferring:
        _draw(variable)


def _exit(scope: keras.StatelessScope, *error: Any) -> None:
    _keras_exit(scope, *error)
    if isinstance(scope.original_scope, DeferringScope) and scope.initialize_variables:  # Keras would initialize here
        for variable in global_state.get_global_attribute("uninitialized_variables") or []:
            _draw(variable)


def _draw(variable: Any) -> None:
    """Call a variable's initializer now if it may share a generator."""
    if not _draws_alone(variable._initializer):
        value = variable._initializer(tuple(variable.shape), dtype=variable.dtype)
        variable._initializer = lambda *_, **_options: value


def _draws_alone(initializer: Callable[..., Any]) -> bool:
    """Whether an initializer is one of Keras with a separate seed, so that it may be called at any time, or never."""
    shared = isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)
    return not shared and type(initializer).__module__.startswith("keras.")


REPLACED = [
    (keras.Variable, "__init__", _init, {"defect": "while in a stateless scope"}),
    (keras.StatelessScope, "__exit__", _exit, {"defect": r"original_scope is None and .*initialize_variables"}),
]
