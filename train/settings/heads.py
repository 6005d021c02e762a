"""The losses, weights and classes of a model with several outputs, in the syntax of the command line.

    --loss kind=sparse_categorical_crossentropy,price=mean_squared_error --loss-weights price=0.1

Standard library only.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from cluster.system.errors import UsageError, nearest


def parse_losses(text: str) -> dict[str, str]:
    """Return the loss of each head that `--loss` names; the loss of all heads or of a single output has the key ""."""
    return _by_head("--loss", text, str, "head=loss") if "=" in text else {"": text}


def parse_weights(text: str) -> dict[str, float]:
    """Return the factors of the heads' losses that `--loss-weights` names."""
    return _by_head("--loss-weights", text, _weight, "head=number, from 0") if text else {}


def parse_outputs(text: str) -> dict[str, int]:
    """Return the number of classes of each head that `--num-outputs` names; that of a single output has the key ""."""
    if "=" in text:
        return _by_head("--num-outputs", text, _count, "head=classes")
    return {"": int(text)} if text.isdecimal() and int(text) > 0 else {}


def check_heads(option: str, named: Iterable[str], heads: Iterable[str]) -> None:
    """Check that the data has labels for every head that an option names."""
    known = list(heads)
    for name in named:
        if name not in known:
            raise UsageError(f"{option} {name!r}: the labels have no such head{nearest(name, known)}")


def _by_head(option: str, text: str, convert: Callable[[str], Any], expected: str) -> dict[str, Any]:
    by_head: dict[str, Any] = {}
    for part in text.split(","):
        head, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            if not (head and equals and value) or head in by_head:
                raise ValueError
            by_head[head] = convert(value)
        except ValueError:
            raise UsageError(f"{option} {part.strip()!r}: expected {expected}, each head once, with commas") from None
    return by_head


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _weight(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value
