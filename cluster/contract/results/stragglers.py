"""Finds stragglers, and tasks that wait for input, from the pace that each task reports.

Under a synchronous strategy every step takes as long as that of the slowest task. So tasks are compared by the part of
a step in which each is busy: waiting for its batch and computing its own gradients.
"""

from collections.abc import Mapping
from statistics import median

from cluster.contract.run.records import Pace, Paces, Starved, Straggler

SLOWER = 1.25
"""A straggler is busy at least this many times as long as the others."""
EXCESS_MS = 1.0
"""A straggler is busy at least this much longer than the others: very short steps vary by chance."""
FEWEST = 20
"""Fewest timed steps of a task for a report: caches are cold at first, and one long step weighs too much."""
STARVED = 0.1
"""A starved task waits for input for at least this share of its steps."""


def findings(paces: Mapping[str, Pace]) -> Paces:
    """Return the stragglers and the starved tasks, worst first, without tasks whose pace is incomplete."""
    known = {name: parts for name, pace in paces.items() if (parts := _busy_and_input(pace))}
    shares = {name: paces[name].input_share or 0.0 for name in known}
    starved = [Starved(name, round(share, 2)) for name, share in shares.items() if share >= STARVED]
    starved.sort(key=lambda task: -task.input_share)
    return Paces(stragglers=tuple(_stragglers(known)), starved=tuple(starved))


def _stragglers(known: Mapping[str, tuple[float, float]]) -> list[Straggler]:
    slow = []
    for name, (busy, waiting) in known.items():
        others = [parts for other, parts in known.items() if other != name]
        if not others:
            continue
        usual, usual_waiting = (median(column) for column in zip(*others, strict=True))
        excess = busy - usual
        if usual > 0 and busy >= SLOWER * usual and excess >= EXCESS_MS:
            part = min(1.0, max(0.0, (waiting - usual_waiting) / excess))
            slow.append(Straggler(name, round(busy / usual, 2), round(part, 2)))
    return sorted(slow, key=lambda straggler: -straggler.slower)


def lines(paces: Paces) -> list[str]:
    """Format stragglers and starved tasks as lines; a straggler due to its input is not listed again as starved."""
    slow_by_input = {each.task for each in paces.stragglers if each.input_part >= STARVED}
    waiting = [each for each in paces.starved if each.task not in slow_by_input]
    return [str(each) for each in (*paces.stragglers, *waiting)]


def _busy_and_input(pace: Pace) -> tuple[float, float] | None:
    """Return the milliseconds of a step in which a task is busy and waits for input; None if the pace is incomplete."""
    mean_ms = (pace.step_ms or {}).get("mean")
    if pace.steps < FEWEST or mean_ms is None or pace.busy_share is None or pace.input_share is None:
        return None
    return mean_ms * pace.busy_share, mean_ms * pace.input_share
