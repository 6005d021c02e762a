"""Patches of Keras and TensorFlow, one file each.

The docstring of each file names the defect, the version that has it, the test that shows it, and the condition under
which the patch is not applied. A patch whose `apply` finds no defect replaces nothing and returns an empty list.

The patches in `SCRIPTS` import nothing of this project: the process of a user's script loads this package by its path
(`hook/sitecustomize.py`), because `import train` can find the user's own `train.py` there.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

FIT = ("symbolic_build", "scalar_metrics", "steps_per_execution")
"""Patches of `Model.fit`; docs/internals/upstream/ has the same changes as a patch for Keras itself."""
SCRIPTS = (*FIT, "layer_aggregation", "layer_losses", "replica_seeds", "callback_files")
"""Patches for users' scripts."""
TRAINING = (*FIT, "layer_losses", "variable_updates", "placed_seeds", "repeated_rows", "masked_moments")
"""Patches for the built-in training program, which has stronger guarantees for layers' state and random numbers."""


def apply(names: Iterable[str] = TRAINING) -> list[str]:
    """Apply patches and return the names of the functions they replaced. Idempotent; call before a model is built."""
    return [replaced for name in names for replaced in importlib.import_module(f"{__name__}.{name}").apply()]


def replace(owner: Any, name: str, new: Callable[..., Any], *, defect: str = "", fixed: str = "(?!)") -> list[str]:
    """Replace a function of Keras whose source has the pattern `defect` and not `fixed`, unless it is replaced already.

    Returns the function's name if it was replaced.
    """
    function = getattr(owner, name)
    source = inspect.getsource(function)
    if function is new or not re.search(defect, source) or re.search(fixed, source):
        return []
    setattr(owner, name, new)
    return [name]
