"""The built-in presets: complete configurations, each a module with the preset's name.

A module has a function `preset` that returns a `TrainConfig`, and the parts that it names. It must not import slow
modules such as TensorFlow at the top, because every command that reads a configuration imports it.
"""

import importlib
import pkgutil
from typing import Any


def list_presets() -> list[str]:
    """Return the names of the presets without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_preset(name: str) -> Any:
    """Return the function of the preset `name`."""
    return importlib.import_module(f"{__name__}.{name}").preset
