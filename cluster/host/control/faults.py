"""The kinds of faults: one record each. A runtime's `faults.py` injects each, by a method of its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultKind:
    """The properties of a kind of fault.

    Attributes:
        name: on the command line, and of the method that injects it.
        lasts: whether it lasts until it is undone, which happens once the others have noticed it.
        unnoticed: whether no other task acts on it, so that it is ended after some seconds.
        ends: how the run may end because of it; None: it goes on.
        takes_whole: whether it can be injected into the task's agent too.
        recorded: whether an event records it, from which everything is counted.
        needs_trainer: why it needs the built-in trainer; empty where it does not.
        draws: how often it is among the kinds that a storm draws from, where the run outlives it.
        whole_draws: the same for the whole task.
        synchronous: whether a storm draws it for synchronous strategies alone, because it costs steps that others
            cannot repeat.
        elastic: whether a storm draws it for runs alone that go on without a worker, see `--min-workers`; there it
            lasts until they do.
    """

    name: str
    lasts: bool = False
    unnoticed: bool = False
    ends: tuple[str | None, ...] = (None, "succeeded")
    takes_whole: bool = False
    recorded: bool = True
    needs_trainer: str = ""
    draws: int = 0
    whole_draws: int = 0
    synchronous: bool = False
    elastic: bool = False

    @property
    def ends_run(self) -> bool:
        """Whether it is the end of the run."""
        return None not in self.ends


KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("kill", takes_whole=True, draws=6, whole_draws=2),
        FaultKind("lose", lasts=True, draws=1, elastic=True),  # the machine that was lost is there again
        FaultKind("stop", ends=("stopped",)),
        FaultKind("pause", lasts=True, draws=1),  # the machine that hung comes back
        FaultKind("slow", lasts=True, unnoticed=True, draws=1),
        # A damaged checkpoint costs the steps since the one before it.
        FaultKind("corrupt", needs_trainer="its checkpoints are its own", draws=1, synchronous=True),
        FaultKind("partition", lasts=True, draws=1),  # the cable is plugged in again
        FaultKind("oom", draws=1),
        FaultKind("diskfull", ends=("failed",), recorded=False),  # no room is left for an event
    )
}
"""Every kind by its name; a storm draws from them in this order."""
STORM = "storm"
"""One fault after the other: `storm.py`."""
