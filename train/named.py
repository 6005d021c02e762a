"""A value, or several by name: the features of a model with several inputs, the labels of one with several outputs.

What is one value for a plain model is a dictionary for the other, with the names that its data gave. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Named = Any
"""A value, or a dictionary of such values by name."""


def each(function: Callable[..., Any], value: Named, *others: Named) -> Named:
    """Return what a function makes of a value, or of every value of a dictionary, with those of the same name."""
    if not isinstance(value, Mapping):
        return function(value, *others)
    return {name: function(one, *(other[name] for other in others)) for name, one in value.items()}


def leaves(value: Named) -> list[Any]:
    """Return the value itself, or those of a dictionary in its order."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def in_words(value: Named) -> dict[str, Any]:
    """Return each value by what an error calls it: nothing, or its name in quotes after a space."""
    return {f" {name!r}": one for name, one in value.items()} if isinstance(value, Mapping) else {"": value}
