"""What `doctor` found, as lines of text."""

from __future__ import annotations

from typing import Any

from cluster.host.view.columns import columns, plain_lines


@plain_lines
def findings_lines(value: dict[str, Any]) -> list[str]:
    """Return what the doctor found as lines of text."""
    return columns(
        (found["state"], found["check"], "; ".join(filter(None, (found["detail"], found["fix"]))))
        for found in value["findings"]
    )
