"""Stragglers, tasks that wait for input, and tasks for which the others wait, from what each task reports.

Under a synchronous strategy every step takes as long as that of the slowest task. So tasks are compared by the part of
a step in which each is busy: waiting for its batch and computing its own gradients.
"""

from collections.abc import Collection, Mapping
from statistics import median

from cluster.contract.run.heartbeat import HEARTBEAT_S
from cluster.contract.run.records import FINAL_STATES, Heartbeat, Pace, Paces, Place, Starved, Straggler
from cluster.contract.spec import ClusterSpec

SLOWER = 1.25
"""A straggler is busy at least this many times as long as the others."""
EXCESS_MS = 1.0
"""A straggler is busy at least this much longer: very short steps differ by chance."""
FEWEST = 20
"""With fewer timed steps nothing is reported: caches are cold, and one long step weighs too much."""
STARVED = 0.1
"""A starved task waits for input for at least this share of its steps."""


def stragglers(paces: Mapping[str, Pace]) -> list[Straggler]:
    """Return the stragglers, the slowest first; a task whose pace is not known completely is left out."""
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
    """Return the starved tasks, the one that waits longest first."""
    shares = {name: pace.input_share or 0.0 for name, pace in paces.items() if _measured(pace)}
    waiting = [Starved(name, round(share, 2)) for name, share in shares.items() if share >= STARVED]
    return sorted(waiting, key=lambda task: -task.input_share)


def findings(paces: Mapping[str, Pace]) -> Paces:
    """Return the tasks that stand out."""
    return Paces(stragglers=tuple(stragglers(paces)), starved=tuple(starved(paces)))


def lines(paces: Paces) -> list[str]:
    """Return the tasks that stand out as lines of text; a straggler due to its input is not repeated as starved."""
    slow_by_input = {each.task for each in paces.stragglers if each.input_part >= STARVED}
    waiting = [each for each in paces.starved if each.task not in slow_by_input]
    return [str(each) for each in (*paces.stragglers, *waiting)]


def find_late(
    spec: ClusterSpec, beats: Mapping[str, Heartbeat], generation: int, silent: Collection[str] = ()
) -> tuple[list[str], str]:
    """Return the late tasks of a generation, and a text about what they lack; none, and "", if no task waits.

    A task waits that is at a place for two heartbeats. A silent one may have entered it after its last heartbeat. Where
    all wait, as around a dead link, those are late that wait for what others have left; at the same place, none is.
    """
    found = [beats[task.name] for task in spec.members if task.name in beats]
    at = {it.task: it.position for it in found if it.generation == generation and it.state not in FINAL_STATES}
    order = {name: (it.step, [*Place].index(it.place), it.left) if it else (-1, 0, 0) for name, it in at.items()}
    still = {name for name, it in at.items() if it and it.seconds >= 2 * HEARTBEAT_S} - {*silent}
    waits = {name for name in still if not order[name][2]} or (still if silent else set())
    if not waits:
        return [], ""
    first, *_, last = sorted([order[name] for name in waits] * 2)
    late = sorted(name for name in at if name not in waits and (name in silent or order[name] < last))
    verb = "finished" if not late or {*silent} & {*late} else "reached"
    if late:  # a neighbour may still wait for a part of what a silent task has left
        first = min((order[name] for name in waits if order[name] >= min(order[each] for each in late)), default=last)
    elif first < last:
        late = sorted(name for name in waits if order[name] == first)
    where = ("work after the " if first[2] else "") + [*Place][first[1]] + (f" of step {first[0]}" if first[0] else "")
    text = f"{' and '.join(late)} {'has' if len(late) == 1 else 'have'} not {verb} the {where}; the others wait"
    return late, text if late else f"every task waits in the {where}"


def _measured(pace: Pace) -> bool:
    return pace.steps >= FEWEST and None not in (_mean_ms(pace), pace.busy_share, pace.input_share)


def _mean_ms(pace: Pace) -> float | None:
    return (pace.step_ms or {}).get("mean")


def _busy_and_input(pace: Pace) -> tuple[float, float]:
    mean_ms = _mean_ms(pace) or 0.0
    return mean_ms * (pace.busy_share or 0.0), mean_ms * (pace.input_share or 0.0)
