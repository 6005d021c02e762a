"""The types of a configuration's fields: what a preset of the user's own sets is checked, because Python does not."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

from cluster.errors import UsageError
from cluster.messages import plain

EXPECTED = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
}


def check_types(config: Any, where: str = "", prefix: str = "") -> None:
    """Check that every field of a dataclass has a value of its type; a whole number is a number, too.

    Args:
        config: the dataclass; dataclasses in it are checked as well.
        where: what the message says before the field.
        prefix: of the fields' names.

    Raises:
        UsageError: one has another; the message names the field, its value and what was expected.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, field = getattr(config, name), prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if type(value) is not hint:
                raise UsageError(f"{where}{field}={shown(value)}: expected a {hint.__module__}.{hint.__qualname__}")
            check_types(value, where, f"{field}.")
            continue
        kinds = get_args(hint) or (hint,)
        # By their very type: True is an int to Python, and NumPy's numbers cannot be written as JSON.
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            raise UsageError(f"{where}{field}={shown(value)}: expected {' or '.join(EXPECTED[kind] for kind in kinds)}")


def shown(value: Any) -> str:
    """Return a value and its type as messages show them, whatever its class does."""
    try:
        text = repr(value)
    except Exception:
        text = "..."
    return plain(f"{text[:80]} ({type(value).__qualname__})")
