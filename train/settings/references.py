"""What a configuration names: a part that is built in, by its name, or one of the user's own as `package.module:name`.

Checking reads the user's source without running it, so that a typo is found before anything is started.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cluster.system.errors import ClusterError, UsageError, nearest
from cluster.system.messages import described

ROOT = Path(__file__).resolve().parents[2]
NOT_THEIRS = frozenset(
    {"AbortedError", "CancelledError", "DeadlineExceededError", "ResourceExhaustedError", "UnavailableError"}
)
"""TensorFlow's errors that another attempt, or a larger machine, may not meet: a variable that a user's function makes
is sent to every task, and one of these may die meanwhile."""


def check(option: str, reference: str, built_in: Collection[str]) -> None:
    """Check that a reference names something.

    Args:
        option: what the user typed it behind, such as `--model`.
        reference: a name, or `package.module:name`.
        built_in: the names that need no module.

    Raises:
        UsageError: it does not.
    """
    if reference in built_in:
        return
    if ":" not in reference:
        hint = nearest(reference, built_in)
        raise UsageError(f"{option} {reference!r} is neither built in nor of the form package.module:name{hint}")
    source, name = _source(option, reference), reference.partition(":")[2]
    names = None if source is None else _names(source)
    if names is not None and name not in names:
        raise UsageError(f"{option} {reference!r}: {source} has no {name!r}{nearest(name, names) if names else ''}")


def load(option: str, reference: str) -> Any:
    """Return what `package.module:name` names.

    Raises:
        UsageError: there is no such module or name, or importing it fails.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise UsageError(f"{option} {reference!r}: {described(error)}") from error


def call(option: str, reference: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a user's function returns.

    Raises:
        UsageError: it raised something, or ends the program: trying again would only repeat that.
    """
    try:
        return function(*arguments)
    except ClusterError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or type(error).__name__ in NOT_THEIRS:
            raise
        raise UsageError(f"{option} {reference!r}: {described(error)}") from error


def code_dir(reference: str) -> Path | None:
    """Return the folder that must be on a task's path for this reference; None for what each task has anyway."""
    if ":" not in reference:
        return None
    spec = importlib.util.find_spec(reference.partition(":")[0].partition(".")[0])
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        return None  # there is none, or it is a part of Python itself
    path = Path(next(iter(spec.submodule_search_locations or [])) if not spec.origin else spec.origin).resolve()
    if path.name == "__init__.py":
        path = path.parent
    folder = path.parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return None if folder in {ROOT.resolve(), *installed} else folder


def _source(option: str, reference: str) -> Path | None:
    """Return the file of a reference's module; None for one that is not written in Python."""
    module = reference.partition(":")[0]
    try:
        found = _find(module)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{option} {reference!r}: {error}; put its folder on PYTHONPATH") from None
    if found is None:
        raise UsageError(f"{option} {reference!r}: there is no module {module!r} on {_searched()}")
    return Path(found.origin) if found.origin and found.origin.endswith(".py") else None


def _find(module: str) -> ModuleSpec | None:
    """Return where a module is; unlike `importlib.util.find_spec`, without importing the packages that it is in."""
    top, *inner = module.split(".")
    found = importlib.util.find_spec(top)
    for number, _ in enumerate(inner, start=2):
        if found is None or found.submodule_search_locations is None:
            return None
        found = PathFinder.find_spec(".".join([top, *inner][:number]), found.submodule_search_locations)
    return found


def _searched() -> str:
    folders = [folder or "." for folder in sys.path if "python3" not in folder and not folder.endswith(".zip")]
    return f"PYTHONPATH ({', '.join(folders)})"


def _names(source: Path) -> set[str] | None:
    """Return what a module defines at its top level; None where that takes running it."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{source}: {error}; mend it and try again") from None
    names: set[str] = set()
    inside: list[ast.AST] = [tree]
    while inside:
        for node in ast.iter_child_nodes(inside.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                continue  # what is defined in it is its own
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            inside.append(node)
    return None if names & {"*", "__getattr__"} else names
