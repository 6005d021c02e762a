"""What a schedule holds, drawn from a seed: a cluster, its training, and the faults that befall it."""

import random
from dataclasses import dataclass, field
from typing import Any

from cluster.contract import spec

LONGEST_STALE_S = 60.0
"""As long as an NFS client keeps the attributes of a folder by default."""
STOPPING = ("freeze task", "second copy")
"""What makes a task's host stand still, the agent and the programs."""
FOREVER_S = 1e6
"""The length of a freeze that never ends."""
TOPOLOGIES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"workers": 0}),
    (6, {"workers": 1}),
    (8, {"workers": 2}),
    (3, {"workers": 4}),
    (3, {"workers": 1, "evaluator": True}),
    (4, {"workers": 2, "ps": 1}),
    (2, {"workers": 1, "ps": 1, "evaluator": True}),
)


@dataclass
class Drawn:
    """A schedule before it runs."""

    topology: dict[str, Any]
    scripted: bool
    steps: int
    save_every: int
    faults: list[tuple[float, str, str, float]] = field(default_factory=list)
    """When, what, to which task, for how long."""
    fails_at: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    crash_at: dict[str, set[int]] = field(default_factory=dict)
    torn_share: float = 0.0
    skewed: bool = False
    linked: bool = False
    """Whether the agents have connections."""
    stale_s: float = 0.0
    """For how long hosts may remember that a file of the run folder does not exist; where agents have connections."""
    min_workers: int | None = None
    """With how many workers the run continues; None: it needs all."""
    grow: bool = False
    standby_s: float | None = None
    """After how much training standby processes start; None: there are none."""
    revived: bool = False
    """Whether the engine replaces an agent that does not continue, as the supervisor of local tasks does."""

    @property
    def connected(self) -> bool:
        """Whether all agents are connected all the time, but for those that start again or are frozen themselves."""
        hub = any(name == "chief" and kind in ("kill task", *STOPPING) for _, kind, name, _ in self.faults)
        return self.linked and not hub and "chief" not in self.crash_at and "cut" not in self.kinds

    @property
    def kinds(self) -> list[str]:
        """What happens, one entry for each fault."""
        own = ["own failure" if times == 1 else "fails for good" for _, _, times in self.fails_at.values()]
        return [kind for _, kind, _, _ in self.faults] + own + ["crash"] * sum(map(len, self.crash_at.values()))


def draw(seed: int) -> Drawn:
    dice = random.Random(f"schedule {seed}")
    weights, topologies = zip(*TOPOLOGIES, strict=True)
    topology = dice.choices(topologies, weights)[0]
    names = [task.name for task in spec.build(**topology).tasks]
    scripted = not topology.get("ps") and not topology.get("evaluator") and dice.random() < 0.25
    drawn = Drawn(topology, scripted, dice.randint(3, 15), dice.randint(2, 5))
    for _ in range(dice.choice((0, 1, 1, 2, 2, 3, 4))):
        # A script writes no heartbeat: that it was frozen until the others lost contact is not noticed.
        weights = (5, 4, 2, 0 if scripted else 2)
        kind = dice.choices(("kill program", "kill task", "freeze task", "freeze program"), weights)[0]
        longest_s = 6 if scripted and kind == "freeze task" else 30
        drawn.faults.append((dice.uniform(0, 40), kind, dice.choice(names), dice.uniform(0.2, longest_s)))
    if dice.random() < 0.2:
        drawn.faults.append((dice.uniform(0, 30), "stop", "", 0))
    if dice.random() < 0.15:
        members = [name for name in names if not (name == "evaluator" or (topology.get("ps") and "worker" in name))]
        code = dice.choice((-11, 70))
        times = 99 if scripted and code > 0 else dice.choice((1, 1, 99))
        drawn.fails_at[dice.randint(1, drawn.steps)] = (dice.choice(members), code, times)
    if dice.random() < 0.4:
        for _ in range(dice.randint(1, 3)):
            drawn.crash_at.setdefault(dice.choice(names), set()).add(int(dice.lognormvariate(4, 1.2)) + 1)
        drawn.torn_share = dice.choice((0, 0, 0.02))
    drawn.skewed = dice.random() < 0.2
    if set(topology) == {"workers"} and topology["workers"] > 1 and not scripted and dice.random() < 0.3:
        drawn.fails_at = {at: who for at, who in drawn.fails_at.items() if who[0] == "chief"}  # others may be left out
        drawn.min_workers, drawn.grow = topology["workers"] - dice.randint(1, 2), dice.random() < 0.6
        for name in dice.sample(names[1:], topology["workers"] - drawn.min_workers):
            drawn.faults.append((dice.uniform(0, 25), "lose task", name, dice.uniform(30, 150)))
    if not scripted and dice.random() < 0.5:
        drawn.standby_s = dice.choice((0.0, 0.0, dice.uniform(0, 3)))
        drawn.steps += dice.randint(3, 12)  # it takes some until they are ready
        for _ in range(dice.choice((0, 1, 2))):
            drawn.faults.append((dice.uniform(6, 30), "kill program", dice.choice(names), 0.2))
        for _ in range(dice.choice((0, 0, 1, 2))):
            drawn.faults.append((dice.uniform(3, 30), "kill standby", dice.choice(names), 0.2))
    _draw_network(dice, drawn, names)
    _draw_freezes(dice, drawn, names)
    return drawn


def _draw_freezes(dice: random.Random, drawn: Drawn, names: list[str]) -> None:
    """Draw freezes of single processes or whole tasks, some at the same moment, for 5 s, 30 s or permanently."""
    drawn.revived = dice.random() < 0.5
    if dice.random() < 0.6:
        return
    at = dice.uniform(0, 45)
    for _ in range(dice.choice((1, 1, 2))):
        kinds = ["freeze program", "freeze task", "freeze standby"] if not drawn.scripted else ["freeze task"]
        seconds = dice.choice((5.0, 30.0, FOREVER_S, FOREVER_S))
        kind = dice.choice([*kinds, "freeze agent"] if drawn.revived else kinds)
        if drawn.scripted and seconds < FOREVER_S:
            seconds = 5.0
        drawn.faults.append((at + dice.choice((0, dice.uniform(0, 15))), kind, dice.choice(names), seconds))


def _draw_network(dice: random.Random, drawn: Drawn, names: list[str]) -> None:
    """Draw how connections of agents break, how their hosts see the run folder, and which of them the engine loses."""
    drawn.linked = dice.random() < 0.75
    if drawn.linked and dice.random() < 0.4:
        for _ in range(dice.randint(1, 3)):
            drawn.faults.append((dice.uniform(0, 40), "cut", dice.choice(names), dice.uniform(0.2, 20)))
    if drawn.linked and dice.random() < 0.3:
        drawn.stale_s = dice.uniform(3, LONGEST_STALE_S)
    if len(names) > 1 and not drawn.topology.get("ps") and dice.random() < 0.2:
        for _ in range(dice.choice((1, 1, 2))):
            drawn.faults.append((dice.uniform(0, 30), "second copy", dice.choice(names), dice.uniform(2, 60)))
