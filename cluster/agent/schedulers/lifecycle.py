"""How a run goes on when a scheduler starts its tasks again, and which exit code the scheduler gets."""

from __future__ import annotations

from cluster.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TIMEOUT, TimedOut
from cluster.run.folder import RunFolder
from cluster.system.files import remove
from cluster.system.waiting import wait_until

POLL_S = 0.2


def go_on(run: RunFolder) -> None:
    """Begin the next generation of a run whose tasks have all ended."""
    run.begin_generation(run.generation + 1, resumed=True)
    for beat in (run.path / "status").glob("*.json"):
        remove(beat)
    run.reopen()


def await_begin(run: RunFolder, timeout_s: float) -> None:
    """Return once the chief has laid out the run's folder, or opened it again.

    Raises:
        TimedOut: it has not.
    """

    def laid_out() -> bool:
        return run.cluster.exists() and (run.outcome or {}).get("state") != "stopped"

    if not wait_until(laid_out, timeout_s, POLL_S):
        raise TimedOut(f"{run.path} was not laid out in {timeout_s:g} s; see the log of the chief's container")


def exit_code(run: RunFolder) -> int:
    """Return the exit code by which a controller knows how the run ended, and whether to start the task again."""
    outcome = run.outcome or {"state": "stopped"}
    if outcome["state"] == "failed":
        code = int(outcome.get("exit_code") or EXIT_FAILED)
        return code if EXIT_FAILED <= code <= EXIT_TIMEOUT else EXIT_FAILED
    return EXIT_DONE if outcome["state"] == "succeeded" else EXIT_INTERRUPTED
