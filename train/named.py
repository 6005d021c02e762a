"""Functions of a value, or of a dictionary of values by name as for a model with several inputs or outputs.

The names are those in the data. Standard library only.
"""

from collections.abc import Callable, Mapping
from typing import Any

Named = Any
"""A value, or a dictionary of such values by name."""


def each(function: Callable[..., Any], value: Named, *others: Named) -> Named:
    """Apply a function to a value, or to each value of dictionaries with the same names."""
    if not isinstance(value, Mapping):
        return function(value, *others)
    return {name: function(item, *(other[name] for other in others)) for name, item in value.items()}


def leaves(value: Named) -> list[Any]:
    """Return a list of the value, or of the values of a dictionary in its order."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def in_words(value: Named) -> dict[str, Any]:
    """Return values by their label in error messages: a space and the quoted name, or empty for a single value."""
    return {f" {name!r}": item for name, item in value.items()} if isinstance(value, Mapping) else {"": value}
