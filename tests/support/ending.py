"""How a test ends a run that has no tasks."""

from typing import Any

from cluster.contract.results import summary
from cluster.contract.run.folder import RunFolder


def end(run: RunFolder, state: str, **cause: Any) -> dict[str, Any]:
    """Record an outcome and write the summary."""
    run.end(state, **cause)
    return summary.write(run, settle_s=0).to_json()
