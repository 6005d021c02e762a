"""Records: frozen dataclasses, read from JSON of untrusted writers.

The annotation of a field is its check: `Count`, `Seconds`, an enum, another record, a `tuple`, `frozenset` or `dict` of
these, any of them `| None`. So a record read from JSON has all its fields, of the right types and with finite numbers.
Unknown keys survive a round trip.
"""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Self, dataclass_transform

Check = Callable[[Any], Any]
"""A function that returns the checked value, or raises ValueError with a short reason if it is invalid."""

MAX_COUNT = 2**53
MAX_TEXT = MAX_ITEMS = 2**16
MAX_NUMBER = 1e30
MAX_SECONDS = 1e11


def whole(expected: str, low: int, high: int) -> Callable[[Any], int]:
    """Return a check for a whole number from `low` to `high`; `expected` describes it in errors."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise unexpected(expected, value)
        return value

    return check


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_NUMBER:
        raise unexpected("a number", value)
    return float(value) if isinstance(value, float) else int(value)


def _seconds(value: Any) -> float:
    if not 0 <= _number(value) <= MAX_SECONDS:
        raise unexpected(f"seconds, at most {MAX_SECONDS:g}", value)
    return float(value)


def _measured(value: Any) -> float | None:
    if isinstance(value, float) and not abs(value) <= MAX_NUMBER:
        return None
    return None if value is None else _number(value)


def text(value: Any) -> str:
    """Check a string."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise unexpected("a string", value)
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise unexpected("true or false", value)
    return value


def one_of(*names: str) -> Check:
    """Return a check for one of these strings."""

    def check(value: Any) -> Any:
        if value not in names or not isinstance(value, str):
            raise unexpected(f"one of {', '.join(names)}", value)
        return value

    return check


def listing(check: Check) -> Check:
    """Return a check for a list of values that pass `check`."""

    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise unexpected("a list", value)
        return [check(each) for each in value]

    return checked


def mapping(check: Check) -> Callable[[Any], dict[str, Any]]:
    """Return a check for an object with any keys, whose values pass `check`."""

    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise unexpected("an object", value)
        return {name: inside(name, check, each) for name, each in value.items()}

    return checked


def inside(name: str, check: Check, value: Any) -> Any:
    """Return the checked value of the key `name`; an error names the key."""
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name[:40]}: {error}") from None


def unexpected(expected: str, value: Any) -> ValueError:
    """Return the error for an unexpected value."""
    return ValueError(f"expected {expected}, not {type(value).__name__} {ascii(value)[:40]}")


Count = Annotated[int, whole("a whole number from 0", 0, MAX_COUNT)]
ExitCode = Annotated[int, whole("an exit code", -(2**31), 2**31)]
Step = Annotated[int, whole("a number of steps", -1, MAX_COUNT)]
"""The number of finished steps; -1 for none."""
Number = Annotated[float, _number]
Seconds = Annotated[float, _seconds]
"""A duration, or a time since the epoch."""
Measured = Annotated[float | None, _measured]
"""A number; None if it is null, not finite or too large."""

SPARSE = {"sparse": True}
"""Metadata of a field that is written only if its value differs from its default; `sparse=True` marks all fields."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Record:
    """Base class of the records: turns each subclass into a frozen dataclass, without a decorator."""

    all_sparse: ClassVar[bool] = False
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The JSON keys, with their values, that are not fields of the class."""

    def __init_subclass__(cls, *, kw_only: bool = True, sparse: bool = False) -> None:
        cls.all_sparse |= sparse
        dataclass(frozen=True, kw_only=kw_only)(cls)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record in a JSON value; raise ValueError, which names the invalid field."""
        known = _known(cls, value)
        return cls(**known, unknown={name: each for name, each in value.items() if name not in known})

    def to_json(self) -> dict[str, Any]:
        result = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "unknown" and not (_is_sparse(self, each) and value == _default(each)):
                result[each.name] = _plain(value)
        return result | dict(self.unknown)


def dictionary(record: type[Record]) -> Callable[[Any], dict[str, Any]]:
    """Return a check like a record's that returns a dictionary, with the defaults of fields that are not sparse."""
    written = [each for each in fields(record) if each.name != "unknown" and not _is_sparse(record, each)]

    def check(value: Any) -> dict[str, Any]:  # does not build a record: metrics have millions of rows
        known = {name: _plain(each) for name, each in _known(record, value).items()}
        missing = {each.name: _plain(_default(each)) for each in written if each.name not in value}
        return {**value, **known, **missing}

    return check


def _known(record: type[Record], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise unexpected("an object", value)
    checks, required = _fields(record)  # type: ignore[arg-type]  # classes are hashable
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{missing[0]} is missing")
    return {name: inside(name, checks[name], each) for name, each in value.items() if name in checks}


def _is_sparse(record: Record | type[Record], known: Field[Any]) -> bool:
    return record.all_sparse or bool(known.metadata)


def _default(known: Field[Any]) -> Any:
    return known.default if known.default_factory is MISSING else known.default_factory()


@cache
def _fields(record: type[Record]) -> tuple[dict[str, Check], list[str]]:
    hints = typing.get_type_hints(record, include_extras=True)
    own = [each for each in fields(record) if each.name != "unknown"]
    required = [each.name for each in own if each.default is MISSING and each.default_factory is MISSING]
    return {each.name: _check_of(hints[each.name]) for each in own}, required


def _check_of(annotation: Any) -> Check:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    check: Check = annotation
    if origin is Annotated:
        check = annotation.__metadata__[0]
    elif origin in (types.UnionType, typing.Union):
        known = _check_of(next(each for each in arguments if each is not types.NoneType))
        return lambda value: None if value is None else known(value)
    elif origin in (tuple, frozenset):
        items = listing(_check_of(arguments[0]))
        return lambda value: origin(items(value))
    elif origin is dict:
        check = mapping(_check_of(arguments[1]))
    elif annotation in _SIMPLE:
        check = _SIMPLE[annotation]
    elif issubclass(annotation, Record):
        check = annotation.from_json
    elif issubclass(annotation, StrEnum):
        return lambda value: annotation(one_of(*annotation)(value))
    return check


_SIMPLE: dict[Any, Check] = {str: text, bool: _flag, Any: lambda value: value}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
