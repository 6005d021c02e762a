"""When a run, or a task that starts again alone, has failed too often: attempts without progress are counted.

An attempt is one generation of the gang, or one life of a task that starts again alone. How it ended is one of

    OWN            the program's own doing: an exception, an exit code, a crash, memory, a hang
    OUTSIDE        it was killed, or its machine was lost: this never counts, however often it happens
    LOST_CONTACT   the tasks lost each other and none says why: the network, most likely

Progress is a further step than any attempt before had reached, or a newer checkpoint. A checkpoint alone does not do
where the attempt failed at the very place of the one before: a program that fails at step 27 whenever it comes there
has saved at 10, then at 20, and is no nearer to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster import settings
from cluster.run.folder import RunFolder

OWN, OUTSIDE, LOST_CONTACT = "own", "outside", "lost contact"

MAX_RESTARTS = 3
"""How often a program that fails by itself is started again without progress: the default of `--max-restarts`."""
MAX_LOST_CONTACTS = 10
"""How often tasks that lost contact are started again without progress: more often, as there is no culprit."""
STEADY_S = 600.0
"""A script tells no step: an attempt that lived this long got somewhere."""
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Attempt:
    """How one attempt ended."""

    kind: str
    furthest: int = -1
    """The steps that the task at fault had done; -1: it came to none."""
    saved: int = -1
    """The newest checkpoint by then."""
    lived_s: float = 0.0
    """How long a script ran; 0 for programs that tell their steps."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Attempt:
        """Return the attempt that a record tells of; what is missing there is not known."""
        known = ("kind", "furthest", "saved", "lived_s")
        return cls(**{"kind": OUTSIDE} | {name: record[name] for name in known if name in record})


def without_progress(attempts: Sequence[Attempt], kinds: Collection[str] = (OWN,)) -> int:
    """Return how many of the attempts, the last ones, failed in one of these ways without progress in between."""
    count, best, best_then, saved_then = 0, -1, -1, -1
    for attempt in attempts:
        best = max(best, attempt.furthest)
        if attempt.kind not in kinds:
            continue
        # What others saved while the task at fault did no step of its own brings it no nearer.
        nearer = attempt.saved > saved_then and 0 <= attempt.furthest < best_then
        progress = best > best_then or nearer or attempt.lived_s > STEADY_S
        count = 1 if progress else count + 1
        best_then, saved_then = best, attempt.saved
    return count


def too_many(attempts: Sequence[Attempt], max_restarts: int) -> int:
    """Return how many failures without progress the last attempt makes where those are too many; otherwise 0."""
    for kinds, most in (((OWN,), max_restarts), ((OWN, LOST_CONTACT), max(max_restarts, MAX_LOST_CONTACTS))):
        if attempts[-1].kind in kinds and (count := without_progress(attempts, kinds)) > most:
            return count
    return 0


def pause_s(attempts: Sequence[Attempt]) -> float:
    """Return how long to wait after the last of these attempts: none after a kill from outside."""
    if attempts[-1].kind == OUTSIDE:
        return 0.0
    count = max(1, without_progress(attempts, (OWN, LOST_CONTACT)))
    return float(min(LONGEST_PAUSE_S, settings.seconds("RESTART_PAUSE_S") * 2 ** min(count - 1, 30)))


def of_gang(run: RunFolder, generation: int) -> list[Attempt]:
    """Return the attempts before this generation, since `up` or `scale` began the first of them."""
    since = first_generation(run)
    lives = [life for life in run.generations() if since < life["generation"] <= generation and "task" in life]
    return [Attempt.of(life) for life in lives]


def of_task(run: RunFolder, task: str) -> list[Attempt]:
    """Return the attempts of a task that starts again alone, since `up` or `scale`."""
    return [Attempt.of(event["detail"]) for event in restarted_alone(run, task)]


def restarted_alone(run: RunFolder, task: str) -> list[dict[str, Any]]:
    """Return the events at which a task was started again alone since `up` or `scale`."""
    first = first_generation(run)
    events = [e for e in run.events() if e["task"] == task and e["event"] == "restarted"]
    return [e for e in events if e["generation"] >= first]


def restarts(run: RunFolder, task: str) -> int:
    """Return how often a task's program was started again since `up` or `scale`: alone, or with the gang."""
    return run.generation - first_generation(run) + len(restarted_alone(run, task))


def first_generation(run: RunFolder) -> int:
    """Return the generation that `up` or `scale` began: the newest that no task's failure did."""
    return max((g["generation"] for g in run.generations() if "task" not in g), default=0)


def max_restarts(run: RunFolder) -> int:
    """Return how many restarts without progress the run was started with."""
    return int(run.started.get("max_restarts", MAX_RESTARTS))
