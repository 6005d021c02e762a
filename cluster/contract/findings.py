"""The result of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    state: str
    """`ok`, `warning` (it works, but not as well as it could) or `failed`."""
    detail: str
    fix: str = ""
