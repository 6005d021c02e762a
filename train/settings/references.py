"""References of a configuration: the name of a built-in part, or the user's `package.module:name`.

Checking reads the user's source without running it, so that a typo is found before a run starts.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import symtable
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cluster.system.errors import ClusterError, UsageError, nearest
from cluster.system.messages import described

ROOT = Path(__file__).resolve().parents[2]
RETRYABLE_ERRORS = frozenset(
    {"AbortedError", "CancelledError", "DeadlineExceededError", "ResourceExhaustedError", "UnavailableError"}
)
"""TensorFlow errors that a restart or a larger machine may avoid: creating a variable in a user's function broadcasts
it to all tasks, one of which may die at that moment."""


def check_reference(option: str, reference: str, built_in: Collection[str]) -> None:
    """Raise UsageError, with the nearest existing name, unless a reference exists."""
    if reference in built_in:
        return
    if ":" not in reference:
        hint = nearest(reference, built_in) + ("; Keras has keras.losses:NAME" if option == "--loss" else "")
        raise UsageError(f"{option} {reference!r} is neither built in nor of the form package.module:name{hint}")
    source, name = _source(option, reference), reference.partition(":")[2]
    names = None if source is None else _names(source)
    if names is not None and name not in names:
        raise UsageError(f"{option} {reference!r}: {source} has no {name!r}{nearest(name, names) if names else ''}")


def load_object(option: str, reference: str) -> Any:
    """Import the object `package.module:name`."""
    module, _, name = reference.partition(":")
    with user_errors(f"{option} {reference!r}"):
        return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def user_errors(
    subject: str, error_class: type[ClusterError] = UsageError, *, except_retryable: bool = False
) -> Iterator[None]:
    """Context manager that turns any exception of a user's code into a one-line error that begins with `subject`."""
    try:
        yield
    except (ClusterError, GeneratorExit):
        raise
    except BaseException as error:  # an interrupt is the user's code, too: the terminal's does not reach this process
        if except_retryable and (isinstance(error, MemoryError) or type(error).__name__ in RETRYABLE_ERRORS):
            raise
        raise error_class(f"{subject}: {described(error)}") from error


def accepts_arguments(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function can be called with these arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        pass
    return True


def call_user_function(option: str, reference: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function; turn its exceptions into UsageErrors, except those in `RETRYABLE_ERRORS`."""
    with user_errors(f"{option} {reference!r}", except_retryable=True):
        return function(*arguments)


def code_dir(reference: str) -> Path | None:
    """Return the folder to add to a task's Python path for a reference; None if every task can import it."""
    if ":" not in reference:
        return None
    spec = importlib.util.find_spec(reference.partition(":")[0].partition(".")[0])
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        return None  # missing, or a part of Python
    path = Path(next(iter(spec.submodule_search_locations or [])) if not spec.origin else spec.origin).resolve()
    if path.name == "__init__.py":
        path = path.parent
    folder = path.parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return None if folder in {ROOT.resolve(), *installed} else folder


def _source(option: str, reference: str) -> Path | None:
    """Return the file of a reference's module; None if it is not written in Python."""
    module = reference.partition(":")[0]
    try:
        spec = _find(module)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{option} {reference!r}: {error}; put its folder on PYTHONPATH") from None
    if spec is None:
        folders = [folder or "." for folder in sys.path if "python3" not in folder and not folder.endswith(".zip")]
        path = f"PYTHONPATH ({', '.join(folders)})"
        raise UsageError(f"{option} {reference!r}: there is no module {module!r} on {path}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _find(module: str) -> ModuleSpec | None:
    """Find a module; unlike `importlib.util.find_spec`, without importing its parent packages."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    for number, _ in enumerate(inner, start=2):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([top, *inner][:number]), spec.submodule_search_locations)
    return spec


def _names(source: Path) -> set[str] | None:
    """Return the names that a module defines at its top level; None if only running it shows them."""
    try:
        text = source.read_text(encoding="utf-8")
        tree, symbols = ast.parse(text, source.name), symtable.symtable(text, str(source), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{source}: {error}; fix it and try again") from None
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    nodes = list(ast.walk(tree))
    star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return None if star or "__getattr__" in names or used & {"exec", "globals", "setattr", "vars"} else names
