"""Arrays that a script's generator yields are copied, so that a step on several tasks does not overwrite them.

Defect: the tensors of `Dataset.from_generator` share the memory of NumPy arrays that begin at a multiple of 64 bytes.
Where tasks divide a batch, TensorFlow takes the parts for its own and writes results into them: a generator or
PyDataset that yields slices of an array then trains on other values in the next epoch.
Versions: TensorFlow 2.21.0.
Test: tests/unit/train/patches/test_script_patches.py::test_numbers_and_arrays_of_a_script_must_be_those_of_one_process
Not applied: if the source of `FuncRegistry._convert` copies.
"""

import inspect
import weakref
from typing import Any

import numpy as np
from tensorflow.python.ops.script_ops import FuncRegistry  # has no public name

_convert = FuncRegistry._convert
_copies: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
"""By their ids. TensorFlow converts what `from_generator` yields twice."""


def apply() -> list[str]:
    """Replace the static method if it does not copy."""
    if FuncRegistry._convert is _copy or "copy" in inspect.getsource(_convert):
        return []
    FuncRegistry._convert = staticmethod(_copy)
    return ["_convert"]


def _copy(value: Any, dtype: Any = None) -> Any:
    converted = _convert(value, dtype)
    if not isinstance(converted, np.ndarray) or _copies.get(id(converted)) is converted:
        return converted
    copy = converted.copy()
    _copies[id(copy)] = copy
    return copy
