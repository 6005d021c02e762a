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


def stragglers(paces: Mapping[str, Pace]) -> list[Straggler]:
    """Return the stragglers, slowest first, without tasks whose pace is incomplete."""
    known = {name: _busy_and_input(pace) for name, pace in paces.items() if _measured(pace)}
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


def starved(paces: Mapping[str, Pace]) -> list[Starved]:
    """Return the starved tasks, by share of waiting, largest first."""
    shares = {name: pace.input_share or 0.0 for name, pace in paces.items() if _measured(pace)}
    waiting = [Starved(name, round(share, 2)) for name, share in shares.items() if share >= STARVED]
    return sorted(waiting, key=lambda task: -task.input_share)


def findings(paces: Mapping[str, Pace]) -> Paces:
    """Return the stragglers and the starved tasks."""
    return Paces(stragglers=tuple(stragglers(paces)), starved=tuple(starved(paces)))


def lines(paces: Paces) -> list[str]:
    """Format stragglers and starved tasks as lines; a straggler due to its input is not listed again as starved."""
    slow_by_input = {each.task for each in paces.stragglers if each.input_part >= STARVED}
    waiting = [each for each in paces.starved if each.task not in slow_by_input]
    return [str(each) for each in (*paces.stragglers, *waiting)]


def _measured(pace: Pace) -> bool:
    return pace.steps >= FEWEST and None not in (_mean_ms(pace), pace.busy_share, pace.input_share)


def _mean_ms(pace: Pace) -> float | None:
    return (pace.step_ms or {}).get("mean")


def _busy_and_input(pace: Pace) -> tuple[float, float]:
    mean_ms = _mean_ms(pace) or 0.0
    return mean_ms * (pace.busy_share or 0.0), mean_ms * (pace.input_share or 0.0)
