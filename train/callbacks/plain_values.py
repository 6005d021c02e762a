"""Encoding of Python values as bytes, without pickle: decoding creates data and runs no code.

Decoding creates numbers, text, containers, arrays and random generators. It updates objects, functions with closures,
variables, metrics and models in place, so the decoding process must have an equal object. Callbacks that the same
function creates meet this condition.
"""

import collections
import enum
import functools
import io
import json
import logging
import pathlib
import random
import sys
import threading
import types
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

COMPARISONS = {name: getattr(keras.ops, name) for name in ("less", "greater")} if hasattr(keras, "ops") else {}
"""The functions with which Keras 3 compares monitored values.

Keras 3 chooses one at the end of the first epoch and then reverses the sign of `min_delta`. Choosing again after a
restart would reverse the sign again.
"""
KERAS_ATTRIBUTES = ("model", "_model", "params", "_params", "validation_data")
"""Attributes that Keras gives every callback."""
_FACTORIES = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, collections.Counter, dict, float, int, list, set, str, tuple)},
}
_STATELESS = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    functools.partial,
    np.ufunc,
    type(threading.Lock()),
    type(threading.RLock()),
    logging.Logger,
    tf.summary.SummaryWriter,
    tf.data.Dataset,
)
_MODELS = (keras.Model, keras.layers.Layer, keras.optimizers.Optimizer)
_CONTENTS = (dict, list, tuple, str, bytes, int, float, complex)
"""Types whose subclasses have contents besides their attributes; those of other types have their own `__reduce__`."""
_FILLED = (list, dict, set, collections.deque)
"""Containers that are filled in place, because several attributes or callbacks may share one."""
_WITHOUT_STATE = {
    keras.callbacks.CSVLogger: ("append_header", "csv_file", "writer"),
    keras.callbacks.TensorBoard: ("_is_tracing", "_profiler_started", "_batch_trace_context", "_writers"),
}
"""Attributes of Keras's callbacks that belong to a process, not to the training."""
_FOREIGN = {"tensorflow", "keras", "tf_keras", *sys.stdlib_module_names}
"""Packages whose objects are not encoded by their attributes."""


def encode_value(value: Any, *, in_place: bool = False, elsewhere: Container[int] = ()) -> bytes:
    """Encode a value as bytes, the same for equal values; raise TypeError if something in it cannot be encoded.

    With `in_place`, `decode_value` will receive an equal object to update. `elsewhere` has the ids of variables that
    are saved elsewhere and left out of models, layers and optimizers.
    """
    arrays: list[np.ndarray] = []
    tree = json.dumps(_Encoder(arrays, elsewhere).plain(value, in_place)).encode()
    file = io.BytesIO()
    for array in (np.frombuffer(tree, np.uint8), *arrays):
        np.save(file, array, allow_pickle=False)
    return file.getvalue()


def decode_value(encoded: bytes, current: Any = None, *, elsewhere: Container[int] = ()) -> Any:
    """Decode a value, or update `current` to it; raise ValueError if `current` is an object of another kind."""
    file, arrays = io.BytesIO(encoded), []
    while file.tell() < len(encoded):
        arrays.append(np.load(file, allow_pickle=False))
    try:
        return _Decoder(arrays[1:], elsewhere).whole(json.loads(arrays[0].tobytes()), current)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"cannot be restored: {error}") from None


def encode_attributes(callback: Any) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the encoded attributes of a callback, and the types of those that cannot be encoded."""
    encoded, lost, elsewhere = {}, {}, _elsewhere(callback)
    skipped = {name for kind, names in _WITHOUT_STATE.items() if isinstance(callback, kind) for name in names}
    for name, value in attributes_of(callback).items():
        if name in skipped:
            continue
        try:
            encoded[name] = encode_value(value, in_place=True, elsewhere=elsewhere)
        except (TypeError, ValueError, RecursionError):  # a model of tf_keras that is not built is a ValueError
            lost[name] = type(value).__name__
    return encoded, lost


def restore_attributes(callbacks: Sequence[Any], saved: Sequence[Any], made: Sequence[dict[str, bytes]]) -> list[str]:
    """Restore the attributes of callbacks with saved ones; return the names of those that could not be restored.

    `made` are the attributes of new callbacks, which are not saved unless they have changed.
    """
    lost: list[str] = []
    seen: dict[int, tuple[Any, bytes]] = {}
    for callback, changed, first in zip(callbacks, saved, made, strict=True):
        if changed is None:
            continue
        present, elsewhere = encode_attributes(callback)[0], _elsewhere(callback)
        # Such as by `on_train_begin`. An attribute that cannot be encoded, such as an open file, stays.
        differing = {name: encoded for name, encoded in first.items() if present.get(name, encoded) != encoded}
        for name, encoded in (differing | changed).items():
            current = getattr(callback, name, None)
            if isinstance(current, _FILLED) and (
                name not in vars(callback) or seen.setdefault(id(current), (current, encoded))[1] != encoded
            ):
                current = None  # of the class, or shared by attributes that have separate ones in the checkpoint
            try:
                setattr(callback, name, decode_value(encoded, current, elsewhere=elsewhere))
            except ValueError:
                lost.append(f"{type(callback).__name__}.{name}")
    return lost


def _elsewhere(callback: Any) -> set[int]:
    """Return the ids of the variables of the trained model and its optimizer, which the checkpoint has anyway."""
    parts = [callback.model, callback.model.optimizer] if callback.model else []
    return {id(variable) for part in parts for variable in variables_of(part)}


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without those that Keras gives a callback."""
    others = KERAS_ATTRIBUTES if isinstance(value, keras.callbacks.Callback) else ()
    return {name: part for name, part in vars(value).items() if name not in others}


def _pairs(mapping: Any) -> list[list[Any]]:
    return [[key, part] for key, part in mapping.items()]


def _factory(mapping: Any) -> str | None:
    return next((name for name, factory in _FACTORIES.items() if factory is mapping.default_factory), None)


def _default_dict(parts: Any, current: Any) -> Any:
    factory, pairs = parts
    return collections.defaultdict(_FACTORIES[factory] if factory else current.default_factory, pairs)


def _python_random(state: Any, current: Any) -> Any:
    generator = current if type(current) is random.Random else random.Random()  # noqa: S311
    generator.setstate(state)
    return generator


def _random_state(state: Any, current: Any) -> Any:
    generator = current if type(current) is np.random.RandomState else np.random.RandomState()
    generator.set_state(state)
    return generator


def _generator(state: Any, current: Any) -> Any:
    name = state["bit_generator"]
    if type(current) is not np.random.Generator or type(current.bit_generator).__name__ != name:
        current = np.random.Generator(getattr(np.random, name)())
    current.bit_generator.state = state
    return current


_CREATED: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    tuple: (list, lambda parts, _: tuple(parts)),
    set: (lambda value: sorted(value, key=repr), lambda parts, _: set(parts)),
    frozenset: (lambda value: sorted(value, key=repr), lambda parts, _: frozenset(parts)),
    collections.deque: (lambda value: [value.maxlen, list(value)], lambda p, _: collections.deque(p[1], p[0])),
    dict: (_pairs, lambda pairs, _: dict(pairs)),
    collections.OrderedDict: (_pairs, lambda pairs, _: collections.OrderedDict(pairs)),
    collections.Counter: (_pairs, lambda pairs, _: collections.Counter(dict(pairs))),
    collections.defaultdict: (lambda value: [_factory(value), _pairs(value)], _default_dict),
    types.SimpleNamespace: (vars, lambda parts, _: types.SimpleNamespace(**parts)),
    bytes: (lambda value: np.frombuffer(value, np.uint8), lambda array, _: array.tobytes()),
    type(pathlib.Path()): (str, lambda text, _: pathlib.Path(text)),
    random.Random: (lambda value: value.getstate(), _python_random),
    np.random.Generator: (lambda value: value.bit_generator.state, _generator),
    np.random.RandomState: (lambda value: value.get_state(legacy=False), _random_state),
    tf.__internal__.EagerTensor: (lambda value: value.numpy(), lambda array, _: tf.constant(array)),
}
"""Types whose values are created on decoding: value -> simpler value; (simpler value, current value) -> value."""
_NAMES = {kind.__name__: kind for kind in _CREATED}


class _Encoder:
    def __init__(self, arrays: list[np.ndarray], elsewhere: Container[int]) -> None:
        self._arrays, self._elsewhere = arrays, elsewhere
        self._entered: set[int] = set()

    def plain(self, value: Any, in_place: bool = False) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.plain(part) for part in value]
        if kind is np.ndarray or isinstance(value, np.generic):
            return {"scalar" if isinstance(value, np.generic) else "array": self._array(value)}
        if names := [name for name, comparison in COMPARISONS.items() if value is comparison]:
            return {"comparison": names[0]}
        if kind in _CREATED and (in_place or kind is not collections.defaultdict or _factory(value)):
            return {kind.__name__: self.plain(_CREATED[kind][0](value))}
        if not in_place or id(value) in self._entered:
            raise TypeError(f"{kind.__name__} cannot be encoded")
        self._entered.add(id(value))
        try:
            return self._in_place(value)
        finally:
            self._entered.discard(id(value))

    def _in_place(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return {"enum": [_name(value), value.name]}
        if variables := _variables(value, self._elsewhere):
            return {"variables": [_name(value), [self._array(variable.numpy()) for variable in variables]]}
        if isinstance(value, (*_STATELESS, *_MODELS)):
            return {"same": [_name(value), None]}
        if isinstance(value, types.MethodType):
            return {"method": [_name(value), self.plain(value.__self__, in_place=True)]}
        if isinstance(value, types.FunctionType):
            return {"function": [_name(value), self._cells(value)]}
        if not _is_encoded_by_attributes(value):
            raise TypeError(f"{type(value).__name__} cannot be encoded")
        parts = {name: self.plain(part, in_place=True) for name, part in attributes_of(value).items()}
        return {"object": [_name(value), parts]}

    def _cells(self, function: types.FunctionType) -> dict[str, Any]:
        """Return the values of a closure that can be encoded; most others are tools, not state."""
        cells = {}
        for name, cell in _closure(function).items():
            try:
                cells[name] = self.plain(cell.cell_contents, in_place=True)
            except (TypeError, ValueError, RecursionError):  # an empty cell is a ValueError
                continue
        return cells

    def _array(self, value: Any) -> int:
        array = np.asarray(value)
        if array.dtype.kind not in "biufcSUmM":
            raise TypeError(f"an array of {array.dtype} cannot be encoded")
        self._arrays.append(array)
        return len(self._arrays) - 1


class _Decoder:
    def __init__(self, arrays: list[np.ndarray], elsewhere: Container[int]) -> None:
        self._arrays, self._elsewhere = arrays, elsewhere

    def whole(self, plain: Any, current: Any = None) -> Any:
        if isinstance(plain, list):
            return _fill(current, [self.whole(part) for part in plain])
        if not isinstance(plain, dict):
            return plain
        ((kind, value),) = plain.items()
        if kind in ("array", "scalar"):
            return self._arrays[value] if kind == "array" else self._arrays[value][()]
        if kind == "comparison":
            return COMPARISONS[value]
        if kind in _NAMES:
            return _fill(current, _CREATED[_NAMES[kind]][1](self.whole(value), current))
        name, parts = value
        if name != _name(current):
            raise ValueError(f"{name} is {_name(current)} now")
        return type(current)[parts] if kind == "enum" else self._update(kind, parts, current)

    def _update(self, kind: str, parts: Any, current: Any) -> Any:
        if kind == "variables":
            variables = _variables(current, self._elsewhere)
            if len(variables) != len(parts):
                raise ValueError(f"{len(parts)} variables are {len(variables)} now")
            for variable, number in zip(variables, parts, strict=True):
                variable.assign(self._arrays[number])
        elif kind == "method":
            self.whole(parts, current.__self__)
        elif kind == "function":
            cells = _closure(current)
            for name, part in parts.items():
                cells[name].cell_contents = self.whole(part, cells[name].cell_contents)
        elif kind == "object":
            attributes = vars(current)
            attributes |= {name: self.whole(part, attributes.get(name)) for name, part in parts.items()}
        return current


def _name(value: Any) -> str:
    function_or_type = value if isinstance(value, types.FunctionType) else getattr(value, "__func__", type(value))
    return str(function_or_type.__qualname__)


def _fill(current: Any, new: Any) -> Any:
    """Return the current container with the contents of a new one of its kind, because other objects may have it."""

    def kind(value: Any) -> tuple[Any, ...]:
        return type(value), getattr(value, "maxlen", None), getattr(value, "default_factory", None)

    if not isinstance(new, _FILLED) or kind(current) != kind(new):
        return new
    current.clear()
    current.extend(new) if isinstance(new, (list, collections.deque)) else current.update(new)
    return current


def _closure(function: types.FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _variables(value: Any, elsewhere: Container[int]) -> list[Any]:
    """Return the variables of an object that consists of them, such as a variable, a metric or a random generator.

    Of a model, a layer or an optimizer these are the variables that are not saved elsewhere.
    """
    if isinstance(value, (tf.Variable, getattr(keras, "Variable", tf.Variable))):
        return [value]
    if isinstance(value, keras.metrics.Metric):
        return list(value.variables)
    if isinstance(value, _MODELS):
        return [variable for variable in variables_of(value) if id(variable) not in elsewhere]
    generators = (tf.random.Generator, *([keras.random.SeedGenerator] if hasattr(keras, "random") else []))
    return [value.state] if isinstance(value, generators) else []


def variables_of(value: Any) -> list[Any]:
    """Return the variables of a model, a layer or an optimizer of either Keras."""
    return list(value.variables() if callable(value.variables) else value.variables)


def _is_encoded_by_attributes(value: Any) -> bool:
    """Whether attributes fully describe an object: a callback inside another one, or a plain Python object."""
    if isinstance(value, keras.callbacks.Callback):
        return True
    kind: Any = type(value)
    plain = not isinstance(value, _CONTENTS) and all(
        getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
    return plain and hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in _FOREIGN
