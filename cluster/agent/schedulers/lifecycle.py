"""How a run goes on when a scheduler starts its tasks again, and which exit code the scheduler gets."""

from __future__ import annotations

from cluster.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIMEOUT
from cluster.run.folder import RunFolder
from cluster.system.files import remove


def go_on(run: RunFolder) -> None:
    """Begin the next generation of a run whose tasks have all ended."""
    run.begin_generation(run.generation + 1, resumed=True)
    for beat in (run.path / "status").glob("*.json"):
        remove(beat)
    run.reopen()


def exit_code(run: RunFolder) -> int:
    """Return the exit code by which a controller knows how the run ended, and whether to start the task again."""
    outcome = run.outcome or {"state": "stopped"}
    if outcome["state"] == "failed":
        code = int(outcome.get("exit_code") or EXIT_FAILED)
        return code if EXIT_FAILED <= code <= EXIT_TIMEOUT else EXIT_FAILED
    return EXIT_DONE if outcome["state"] == "succeeded" else EXIT_INTERRUPTED
