"""A module of the user's own, without a file."""

import sys
from types import ModuleType
from typing import Any

import pytest


def put(patch: pytest.MonkeyPatch, name: str, **values: Any) -> Any:
    """Let a module be imported that has these values."""
    module = ModuleType(name)
    vars(module).update(values)
    patch.setitem(sys.modules, name, module)
    return module
