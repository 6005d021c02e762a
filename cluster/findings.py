"""What one check of the doctor found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: str
    """`ok`, `warning` (works, but not as well as it could) or `failed`."""
    detail: str
    fix: str = ""
