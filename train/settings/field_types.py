"""Checks of a configuration's fields: their types, which Python does not check, and their ranges."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from cluster.system.errors import UsageError, nearest
from cluster.system.messages import plain

EXPECTED = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
}


def check_types(config: Any, where: str = "", prefix: str = "") -> None:
    """Check that every field of a dataclass has a value of its type; a float field may hold an int."""
    for name, hint in get_type_hints(type(config)).items():
        value, field = getattr(config, name), prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if type(value) is not hint:
                raise UsageError(f"{where}{field}={shown(value)}: expected a {hint.__module__}.{hint.__qualname__}")
            check_types(value, where, f"{field}.")
            continue
        kinds = get_args(hint) or (hint,)
        # The exact type: True is an int in Python, and NumPy's numbers cannot be written as JSON.
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            raise UsageError(f"{where}{field}={shown(value)}: expected {' or '.join(EXPECTED[kind] for kind in kinds)}")


def shown(value: Any) -> str:
    """Return a value and its type for messages, even if its `repr` fails."""
    try:
        text = repr(value)
    except Exception:
        text = "..."
    return plain(f"{text[:80]} ({type(value).__qualname__})")


def option(name: str) -> str:
    """Return the option of a field, such as `--global-batch` of `global_batch`."""
    return "--" + name.replace("_", "-")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Check that a field's whole number is in its range."""
    if not low <= value <= high:
        raise UsageError(f"{option(name)} {value}: expected a whole number from {low} to {high}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Check that a field's text is one of its choices."""
    if value not in choices:
        raise UsageError(f"{option(name)} {value!r}{nearest(value, choices)}")


def check_number(name: str, value: float, expected: str, *, valid: bool) -> None:
    """Check that a field's number is finite and `valid`, as `expected` describes."""
    if not (math.isfinite(value) and valid):
        raise UsageError(f"{option(name)} {value:g}: expected {expected}")
