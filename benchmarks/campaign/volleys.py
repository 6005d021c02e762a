"""The faults of one run, drawn from a seed: volleys of several at once, and more of them while the run recovers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from cluster.contract.run.records import Heartbeat
from cluster.contract.spec import ClusterSpec

AGENT = "agent"

PHASES: dict[str, Callable[[Heartbeat], bool]] = {
    # Conditions on the task's heartbeat; changes of state are written at once.
    "start": lambda beat: beat.state == "starting",
    "rendezvous": lambda beat: beat.state == "waiting",
    "compile": lambda beat: beat.state == "compiling",
    "step": lambda beat: beat.state == "training",
    "save": lambda beat: beat.state == "saving" and not _last(beat),
    "evaluate": lambda beat: beat.state == "evaluating",
    "export": lambda beat: beat.state == "saving" and _last(beat),
    "end": lambda beat: beat.state in ("done", "stopped"),
}
OPENING = {"step": 4, "save": 3, "evaluate": 2}
"""Phases of the first fault of a volley, with their weights."""
RECOVERING = ("start", "rendezvous", "compile")
"""The phases of the restart that the first fault of a volley causes."""
LAST_PHASES = {"export": 2, "end": 1}
"""Phases of the first fault of each of a run's last volleys, with their weights."""

WEIGHTS = {
    "kill": 10, AGENT: 4, "corrupt": 1, "lose": 2, "slow": 1, "pause": 1, "partition": 2, "oom": 2, "stop": 1,
    "diskfull": 1,
}  # fmt: skip
"""Weight of each kind; `agent`: SIGKILL of the agent, whose program the kernel then kills."""
ENDING = frozenset({"stop", "diskfull"})
"""The kinds after which the run is resumed: that takes as long as ten restarts, so a run has one of them at most."""
LASTS_S = {
    "lose": (0.1, 3.0),
    "slow": (0.5, 3.0),
    "pause": (0.2, 14.0),
    "partition": (0.2, 14.0),
    "oom": (0.5, 1.0),
    "diskfull": (2.0, 6.0),
}
"""Shortest and longest time of the lasting kinds: below and above the time it takes to detect them."""
MORE = (0, 1, 3, 4, 5, 6)
"""Numbers of faults after the first of a volley, all equally likely."""
APART_S = 0.6
"""Longest time between two faults that are injected together."""


@dataclass(frozen=True)
class Shot:
    """One fault of a volley.

    Attributes:
        kind: the kind of fault.
        task: the task.
        phase: the phase of the task to wait for; empty for any.
        after_s: seconds after the previous fault.
        lasts_s: seconds after which the fault is undone.
    """

    kind: str
    task: str
    phase: str
    after_s: float
    lasts_s: float


@dataclass(frozen=True)
class Volley:
    """Faults that are injected together, or while the run recovers from the previous ones.

    Attributes:
        steps: new steps of the run before the volley.
        wait_s: seconds of training before the volley, if the run reports no steps.
        shots: the faults.
    """

    steps: int
    wait_s: float
    shots: tuple[Shot, ...]


def draw(spec: ClusterSpec, seed: str, kinds: Collection[str]) -> Iterator[tuple[Volley, Volley]]:
    """Yield volleys indefinitely, each in two forms: for the middle of a run, and for its end."""
    dice = random.Random(seed)  # noqa: S311  # chaos needs to be repeated, not to be secret
    names = [task.name for task in spec.tasks]
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind in kinds}

    def shot(phase: str, after_s: float) -> Shot:
        kind = dice.choices(list(weights), list(weights.values()))[0]
        if kind in ENDING:
            for each in ENDING & weights.keys():
                del weights[each]
        return Shot(kind, dice.choice(names), phase, after_s, dice.uniform(*LASTS_S.get(kind, (0.0, 0.0))))

    while True:
        first = shot(dice.choices(list(OPENING), list(OPENING.values()))[0], 0.0)
        more = []
        for _ in range(dice.choice(MORE)):
            phase = dice.choice(RECOVERING) if dice.random() < 0.6 else ""
            more.append(shot(phase, 0.0 if phase else dice.uniform(0, APART_S)))
        volley = Volley(dice.randint(2, 25), dice.uniform(0.1, 2.0), (first, *more))
        phase = dice.choices(list(LAST_PHASES), list(LAST_PHASES.values()))[0]
        last = Shot(first.kind, first.task, phase, 0.0, first.lasts_s)
        yield volley, Volley(0, volley.wait_s, (last, *more))


def phase_of(beat: Heartbeat | None) -> str:
    """Return the phase of a program from its heartbeat."""
    return next((name for name, reached in PHASES.items() if beat and reached(beat)), "start")


def _last(beat: Heartbeat) -> bool:
    return beat.step > 0 and beat.step == beat.steps_total
