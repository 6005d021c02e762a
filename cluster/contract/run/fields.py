"""Checks of JSON values from writers that are not trusted.

A check returns the value in the form that the rest of the program relies on: with all keys, each of its type, and with
finite numbers. Keys without a check are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

Check = Callable[[Any], Any]
"""Returns the checked value; raises ValueError with a short reason if it is invalid."""

ObjectCheck = Callable[[Any], dict[str, Any]]

MAX_COUNT = 2**53
MAX_TEXT = 2**16
MAX_NUMBER = 1e30
MAX_SECONDS = 1e11

ABSENT = object()
"""The default of a key that stays missing."""


def count(value: Any) -> int:
    """A whole number, at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise unexpected("a whole number from 0", value)
    return value


def step(value: Any) -> int:
    """The number of finished steps; -1 for none."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= MAX_COUNT:
        raise unexpected("a number of steps", value)
    return value


def code(value: Any) -> int:
    """An exit code."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 2**31:
        raise unexpected("an exit code", value)
    return value


def number(value: Any) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_NUMBER:
        raise unexpected("a number", value)
    return float(value) if isinstance(value, float) else int(value)


def seconds(value: Any) -> float:
    """A duration, or a time in seconds since the epoch."""
    if not 0 <= number(value) <= MAX_SECONDS:
        raise unexpected(f"seconds, at most {MAX_SECONDS:g}", value)
    return float(value)


def measured(value: Any) -> float | None:
    """A number or null; null for one that is not finite or too large."""
    if isinstance(value, float) and not abs(value) <= MAX_NUMBER:
        return None
    return None if value is None else number(value)


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise unexpected("a text", value)
    return value


def flag(value: Any) -> bool:
    """Yes or no."""
    if not isinstance(value, bool):
        raise unexpected("true or false", value)
    return value


def one_of(*names: str) -> Check:
    """One of these words."""

    def check(value: Any) -> Any:
        if value not in names or not isinstance(value, str):
            raise unexpected(f"one of {', '.join(names)}", value)
        return value

    return check


def optional(check: Check) -> Check:
    """A value that passes the check, or null."""
    return lambda value: None if value is None else check(value)


def listing(check: Check, limit: int = 2**16) -> Check:
    """A list of values that pass the check."""

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > limit:
            raise unexpected("a list", value)
        return [check(each) for each in value]

    return checked


def mapping(check: Check) -> ObjectCheck:
    """An object with any keys whose values pass the check."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise unexpected("an object", value)
        return {name: inside(name, check, each) for name, each in value.items()}

    return checked


def record(needed: Mapping[str, Check], usual: Mapping[str, tuple[Check, Any]] | None = None) -> ObjectCheck:
    """An object with these keys, and possibly others.

    Args:
        needed: the check of each required key.
        usual: the check and the default of each optional key.
    """

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise unexpected("an object", value)
        if missing := [name for name in needed if name not in value]:
            raise ValueError(f"{missing[0]} is missing")
        result = dict(value)
        for name, check in needed.items():
            result[name] = inside(name, check, value[name])
        for name, (check, default) in (usual or {}).items():
            if name in value:
                result[name] = inside(name, check, value[name])
            elif default is not ABSENT:
                result[name] = copy(default)
        return result

    return checked


def exactly(needed: Mapping[str, Check]) -> ObjectCheck:
    """An object with these keys; others are removed."""
    check = record(needed)
    return lambda value: {name: each for name, each in check(value).items() if name in needed}


def every(*checks: Check) -> Check:
    """A value that passes several checks in turn."""

    def checked(value: Any) -> Any:
        for check in checks:
            value = check(value)
        return value

    return checked


def inside(name: str, check: Check, value: Any) -> Any:
    """Return the checked value of a key; an error names the key."""
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name[:40]}: {error}") from None


def unexpected(expected: str, value: Any) -> ValueError:
    """Return the error for a value of another type."""
    return ValueError(f"expected {expected}, not {type(value).__name__} {ascii(value)[:40]}")


anything = mapping(lambda value: value)
"""Any object."""
