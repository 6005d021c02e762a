"""Records: frozen dataclasses, read from the JSON of writers that are not trusted.

The annotation of a field is its check: `Count`, `Seconds`, an enum, another record, a `tuple`, `frozenset` or `dict` of
these, any of them `| None`. So a record that was read has every field, each of its type, with finite numbers. Keys that
its class does not know survive a round trip.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Self

from cluster.contract.run.fields import (
    Check,
    code,
    count,
    flag,
    inside,
    listing,
    mapping,
    measured,
    number,
    one_of,
    optional,
    seconds,
    step,
    text,
    unexpected,
)

Count = Annotated[int, count]
ExitCode = Annotated[int, code]
Step = Annotated[int, step]
Number = Annotated[float, number]
Seconds = Annotated[float, seconds]
Measured = Annotated[float | None, measured]

SPARSE = {"sparse": True}
"""The metadata of a field that is written only if it differs from its default."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of the records."""

    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The keys that the class does not know."""

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record in a JSON value.

        Raises:
            ValueError: it is not valid; the message names the field.
        """
        if not isinstance(value, dict):
            raise unexpected("an object", value)
        checks, required = _fields(cls)  # type: ignore[arg-type]  # classes are hashable
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"{missing[0]} is missing")
        known = {name: inside(name, checks[name], each) for name, each in value.items() if name in checks}
        return cls(**known, unknown={name: each for name, each in value.items() if name not in checks})

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        result = dict(self.unknown)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "unknown" and not (each.metadata and value == each.default):
                result[each.name] = _plain(value)
        return result


@cache
def _fields(record: type[Record]) -> tuple[dict[str, Check], list[str]]:
    """Return the check of each field of a class, and the names of those without a default."""
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
        check = optional(_check_of(next(each for each in arguments if each is not types.NoneType)))
    elif origin in (tuple, frozenset):
        check = _collection_of(origin, listing(_check_of(arguments[0])))
    elif origin is dict:
        check = mapping(_check_of(arguments[1]))
    elif annotation in _SIMPLE:
        check = _SIMPLE[annotation]
    elif issubclass(annotation, Record):
        check = annotation.from_json
    elif issubclass(annotation, StrEnum):
        check = _member_of(annotation)
    return check


_SIMPLE: dict[Any, Check] = {str: text, bool: flag, Any: lambda value: value}


def _collection_of(kind: Callable[[Any], Any], items: Check) -> Check:
    return lambda value: kind(items(value))


def _member_of(enum: type[StrEnum]) -> Check:
    return lambda value: enum(one_of(*enum)(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
