"""Python values as bytes and back, without pickle: decoding creates data and runs no code.

Decoding creates numbers, text, containers and arrays. It updates variables and metrics in place, so the decoding
process must have equal objects. Callbacks that the same function creates fulfil that.
"""

from __future__ import annotations

import functools
import io
import json
import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

COMPARISONS = {name: getattr(keras.ops, name) for name in ("less", "greater")} if hasattr(keras, "ops") else {}
"""The functions with which Keras 3 compares monitored values.

Keras 3 chooses one at the end of the first epoch and then reverses the sign of `min_delta`. Choosing again after a
restart would reverse the sign again.
"""
_STATELESS = (type, types.ModuleType, types.BuiltinFunctionType, functools.partial, np.ufunc)
_CREATED: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (lambda value: sorted(value, key=repr), set),
    dict: (lambda value: [[key, part] for key, part in value.items()], dict),
    bytes: (lambda value: np.frombuffer(value, np.uint8), lambda array: array.tobytes()),
    type(pathlib.Path()): (str, pathlib.Path),
}
"""Types whose values are created on decoding: value -> simpler value; simpler value -> value."""
_NAMES = {kind.__name__: kind for kind in _CREATED}


def encode(value: Any) -> bytes:
    """Encode a value as bytes, which are the same for equal values.

    Raises:
        TypeError: something in it cannot be encoded.
    """
    arrays: list[np.ndarray] = []
    if variables := _variables(value):
        plain: Any = {"variables": [_name(value), [_store(variable.numpy(), arrays) for variable in variables]]}
    elif _is_stateless(value):
        plain = {"same": [_name(value), None]}
    else:
        plain = _plain(value, arrays)
    file = io.BytesIO()
    for array in (np.frombuffer(json.dumps(plain).encode(), np.uint8), *arrays):
        np.save(file, array, allow_pickle=False)
    return file.getvalue()


def decode(encoded: bytes, current: Any = None) -> Any:
    """Decode a value, or update `current` to it.

    Raises:
        ValueError: `current` is an object of another kind.
    """
    file, arrays = io.BytesIO(encoded), []
    while file.tell() < len(encoded):
        arrays.append(np.load(file, allow_pickle=False))
    plain, arrays = json.loads(arrays[0].tobytes()), arrays[1:]
    if not isinstance(plain, dict) or not plain.keys() & {"variables", "same"}:
        return _whole(plain, arrays)
    ((kind, (name, numbers)),) = plain.items()
    if name != _name(current):
        raise ValueError(f"{name} is {_name(current)} now")
    if kind == "variables":
        for variable, number in zip(_variables(current), numbers, strict=True):
            variable.assign(arrays[number])
    return current


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a form of the value for JSON, and add its arrays to a list."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(part, arrays) for part in value]
    if kind in _CREATED:
        return {kind.__name__: _plain(_CREATED[kind][0](value), arrays)}
    if isinstance(value, np.ndarray | np.generic):
        return {"array" if isinstance(value, np.ndarray) else "scalar": _store(value, arrays)}
    if names := [name for name, comparison in COMPARISONS.items() if value is comparison]:
        return {"comparison": names[0]}
    raise TypeError(f"{kind.__name__} cannot be encoded")


def _whole(plain: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(plain, list):
        return [_whole(part, arrays) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind in ("array", "scalar"):
        return arrays[value] if kind == "array" else arrays[value][()]
    return COMPARISONS[value] if kind == "comparison" else _CREATED[_NAMES[kind]][1](_whole(value, arrays))


def _store(value: Any, arrays: list[np.ndarray]) -> int:
    array = np.asarray(value)
    if array.dtype.kind not in "biufcSUmM":
        raise TypeError(f"an array of {array.dtype} cannot be encoded")
    arrays.append(array)
    return len(arrays) - 1


def _name(value: Any) -> str:
    """Return the name of a function, or of an object's type."""
    return str((value if isinstance(value, types.FunctionType) else type(value)).__qualname__)


def _variables(value: Any) -> list[Any]:
    """Return the variables of an object that consists of them: a variable or a metric."""
    if isinstance(value, (tf.Variable, getattr(keras, "Variable", tf.Variable))):
        return [value]
    return list(value.variables) if isinstance(value, keras.metrics.Metric) else []


def _is_stateless(value: Any) -> bool:
    """Whether a value is a function without a closure, a class or the like."""
    if any(value is comparison for comparison in COMPARISONS.values()):
        return False
    return isinstance(value, _STATELESS) or (isinstance(value, types.FunctionType) and value.__closure__ is None)
