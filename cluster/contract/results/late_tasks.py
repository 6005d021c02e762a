"""Finds the late tasks, for which the others wait, from the position in each task's heartbeat."""

from collections.abc import Collection, Mapping

from cluster.contract.run.heartbeat import HEARTBEAT_S
from cluster.contract.run.records import FINAL_STATES, Heartbeat, Place, Position
from cluster.contract.spec import ClusterSpec

WAIT_S = 2 * HEARTBEAT_S
"""A task waits if it has been at a place for this long."""


def find_late(
    spec: ClusterSpec, beats: Mapping[str, Heartbeat], generation: int, silent: Collection[str] = ()
) -> tuple[list[str], str]:
    """Return the late tasks of a generation, and a description of their delay; none, and "", if no task waits.

    A silent task may have entered a place after its last heartbeat. If all tasks wait, those at the ends of a dead link
    are late, or those at the earliest place; none is if all are at the same place.
    """
    found = [beats[task.name] for task in spec.members if task.name in beats]
    at = {it.task: it.position for it in found if it.generation == generation and it.state not in FINAL_STATES}
    order = {name: (it.step, [*Place].index(it.place), it.left) if it else (-1, 0, 0) for name, it in at.items()}
    still = {name for name, it in at.items() if it and it.seconds >= WAIT_S} - {*silent}
    waits = {name for name in still if not order[name][2]} or (still if silent else set())
    if not waits:
        return [], ""
    first, *_, last = sorted([order[name] for name in waits] * 2)
    late = sorted(name for name in at if name not in waits and (name in silent or order[name] < last))
    verb = "finished" if not late or {*silent} & {*late} else "reached"
    if late:  # a neighbour of a silent task may still wait at an earlier place, which that task has left
        first = min((order[name] for name in waits if order[name] >= min(order[each] for each in late)), default=last)
    where = ("work after the " if first[2] else "") + [*Place][first[1]] + (f" of step {first[0]}" if first[0] else "")
    if not {*late} - {*silent} and (links := _dead_links(at)):
        late, text = _describe_links(links)
        return late, f"{text}; every task waits in the {where}"
    if not late and first < last:
        late = sorted(name for name in waits if order[name] == first)
    text = f"{' and '.join(late)} {'has' if len(late) == 1 else 'have'} not {verb} the {where}; the others wait"
    return late, text if late else f"every task waits in the {where}"


def _dead_links(positions: Mapping[str, Position | None]) -> set[frozenset[str]]:
    """Return the pairs of tasks between which no connection can be opened."""
    pairs = [(name, other) for name, it in positions.items() if it for other in it.unreachable if other in positions]
    return {frozenset(pair) for pair in pairs if len({*pair}) == 2}


def _describe_links(links: set[frozenset[str]]) -> tuple[list[str], str]:
    """Return the tasks at the ends of dead links, or the only task that all of these share, and a description."""
    ends, shared = frozenset[str]().union(*links), frozenset.intersection(*links)
    if len(shared) != 1:
        return sorted(ends), f"{' and '.join(sorted(ends))} cannot reach each other"
    return [*shared], f"{' and '.join(sorted(ends - shared))} cannot reach {' and '.join(shared)}"
