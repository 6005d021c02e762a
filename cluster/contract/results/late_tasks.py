"""Finds the late tasks, for which the others wait, from the position in each task's heartbeat."""

from collections.abc import Collection, Mapping

from cluster.contract.run.heartbeat import HEARTBEAT_S
from cluster.contract.run.records import FINAL_STATES, Heartbeat, Place
from cluster.contract.spec import ClusterSpec


def find_late(
    spec: ClusterSpec, beats: Mapping[str, Heartbeat], generation: int, silent: Collection[str] = ()
) -> tuple[list[str], str]:
    """Return the late tasks of a generation, and a description of their delay; none, and "", if no task waits.

    A task waits if it has been at a place for two heartbeats; a silent task may have entered it after its last one. If
    all tasks wait, as around a dead link, those at the earliest place are late; none is if all are at the same place.
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
    if late:  # a neighbour of a silent task may still wait at an earlier place, which that task has left
        first = min((order[name] for name in waits if order[name] >= min(order[each] for each in late)), default=last)
    elif first < last:
        late = sorted(name for name in waits if order[name] == first)
    where = ("work after the " if first[2] else "") + [*Place][first[1]] + (f" of step {first[0]}" if first[0] else "")
    text = f"{' and '.join(late)} {'has' if len(late) == 1 else 'have'} not {verb} the {where}; the others wait"
    return late, text if late else f"every task waits in the {where}"
