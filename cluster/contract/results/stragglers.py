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
    known = {name: pace for name, pace in paces.items() if pace.steps >= FEWEST and _is_complete(pace)}
    shares = {name: pace.input_share or 0.0 for name, pace in known.items()}
    starved = [Starved(name, round(share, 2)) for name, share in shares.items() if share >= STARVED]
    starved.sort(key=lambda task: -task.input_share)
    return Paces(stragglers=tuple(_stragglers(known)), starved=tuple(starved))


def _is_complete(pace: Pace) -> bool:
    return None not in ((pace.step_ms or {}).get("mean"), pace.busy_share, pace.input_share)


def _stragglers(paces: Mapping[str, Pace]) -> list[Straggler]:
    known = {name: _busy_and_input(pace) for name, pace in paces.items()}
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


def _busy_and_input(pace: Pace) -> tuple[float, float]:
    mean_ms = (pace.step_ms or {}).get("mean") or 0.0
    return mean_ms * (pace.busy_share or 0.0), mean_ms * (pace.input_share or 0.0)
