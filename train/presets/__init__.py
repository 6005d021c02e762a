"""The built-in presets: complete configurations, a module each, whose name is the preset's.

A module has a function `preset` that returns a `TrainConfig`, and whatever of its own that names. It may import nothing
that takes time, such as TensorFlow, at its top: every command that reads a configuration imports it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def names() -> list[str]:
    """Return the names of the presets, without importing any."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Any:
    """Return the function of the preset called `name`, one of `names`."""
    return importlib.import_module(f"{__name__}.{name}").preset
