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

    @property
    def row(self) -> tuple[str, str, str]:
        """The row of a table: state, check, and the detail with its fix."""
        return self.state, self.check, "; ".join(filter(None, (self.detail, self.fix)))
