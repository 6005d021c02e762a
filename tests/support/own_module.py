"""Modules of a fictitious user."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def put(patch: pytest.MonkeyPatch, name: str, **values: Any) -> Any:
    """Make a module with these values importable, without a file."""
    module = ModuleType(name)
    vars(module).update(values)
    patch.setitem(sys.modules, name, module)
    return module


def write(patch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> Path:
    """Write a module to a folder from which the test can import it; return the folder."""
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    patch.syspath_prepend(folder)
    for imported in {name, name.partition(".")[0]}:
        patch.setitem(sys.modules, imported, None)
        del sys.modules[imported]
    return folder
