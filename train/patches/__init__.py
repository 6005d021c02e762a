"""Patches of Keras and TensorFlow, one file each.

The docstring of each file names the defect, the version that has it, the test that shows it, and the condition under
which the patch is not applied. `REPLACED` lists the functions that it replaces: their owner and name, the
replacement, and patterns. A function is replaced if its source has the pattern `defect` and not `fixed`. A patch of
another kind has a function `apply`, which returns the names of what it replaced, none without the defect.

The patches in `SCRIPTS` import nothing of this project: the process of a user's script loads this package by its path
(`hook/sitecustomize.py`), because `import train` can find the user's own `train.py` there.
"""

import importlib
import inspect
import re
from collections.abc import Iterable

FIT = ("symbolic_build", "scalar_metrics", "steps_per_execution")
"""Patches of `Model.fit`; docs/internals/upstream/ has most of their changes as a patch for Keras itself."""
_OF_LAYERS = ("layer_aggregation", "layer_losses", "replica_seeds", "hidden_layers", "empty_moments")
_OF_SUMS = ("clipped_sums", "scalar_losses")
_OF_CALLBACKS = ("callback_files", "copied_numbers")
_OF_DATA = ("unshared_lengths", "generated_arrays", "absent_parts", "shared_orders")
SCRIPTS = ("iterator_autotuning", *FIT, *_OF_LAYERS, *_OF_SUMS, *_OF_CALLBACKS, *_OF_DATA)
"""Patches for users' scripts."""
LEGACY = ("iterator_autotuning", "adapted_layers")
"""Patches for the built-in training program with tf_keras."""
_OF_TRAINING = ("layer_losses", "variable_updates", "placed_seeds", "repeated_rows", "synchronized_moments")
TRAINING = (*LEGACY, *FIT, *_OF_TRAINING, "deferred_values", *_OF_CALLBACKS)
"""Patches for the built-in training program, which has stronger guarantees for layers' state and random numbers."""


def apply(names: Iterable[str] = TRAINING) -> list[str]:
    """Apply patches and return the names of the functions they replaced. Idempotent; call before a model is built."""
    replaced = []
    for name in names:
        module = importlib.import_module(f"{__name__}.{name}")
        for owner, function, new, patterns in getattr(module, "REPLACED", ()):
            current = getattr(owner, function)
            source = inspect.getsource(current)
            defect, fixed = patterns.get("defect", ""), patterns.get("fixed", "(?!)")
            if current is not new and re.search(defect, source) and not re.search(fixed, source):
                setattr(owner, function, new)
                replaced.append(function)
        if hasattr(module, "apply"):
            replaced += module.apply()
    return replaced
