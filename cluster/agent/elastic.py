"""Elastic runs: which tasks a run can continue without, and when tasks that return are taken in again.

Only decisions: the caller passes the missing and returned tasks and the time. See docs/guides/faults.md for the policy;
`members.py` acts on the decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec, Role
from cluster.system.messages import counted

STEADY_S = 10.0
"""How long a task must have been back before it is taken in. A host that returns is busy at first."""
AGAIN_S = 60.0
"""The same for a task that was left out for the second time; each further time doubles it."""
LONGEST_S = 1800.0
GONE_S = 5.0
"""A task without a new heartbeat for this long is away again."""


@dataclass(frozen=True)
class Elasticity:
    """The requested number of workers that is enough, and whether returning workers are taken in automatically."""

    min_workers: int
    grow: bool = False

    @classmethod
    def of(cls, run: RunFolder) -> Elasticity | None:
        """Return the elasticity that a run was started with; None if it needs every task."""
        started = run.started
        return None if started.min_workers is None else cls(started.min_workers, started.grow)


def leave_out(cluster: ClusterSpec, missing: Collection[str], min_workers: int) -> frozenset[str] | None:
    """Return the tasks that the next generation leaves out; None if the run cannot continue without them.

    Args:
        cluster: every requested task.
        missing: the absent tasks.
        min_workers: how many workers are enough, of a cluster that has at least as many.
    """
    workers = {task.name for task in cluster.of(Role.WORKER)}
    left = workers - set(missing)
    enough = len(left) >= min(min_workers, len(workers))
    return frozenset(missing) if enough and set(missing) <= workers else None


def cause(cluster: ClusterSpec, left_out: Collection[str], missing: Collection[str], timeout_s: float) -> str:
    """Describe why a generation leaves out tasks that were missing at the rendezvous."""
    now = counted(len(cluster.without(left_out).of(Role.WORKER)), "worker")
    return f"{', '.join(sorted(missing))} stayed away for {timeout_s:g} s: the run continues with {now}"


def patience_s(times_left_out: int) -> float:
    """Return how long a task must have been back before it is taken in, so that a flapping host costs little."""
    if times_left_out <= 1:
        return STEADY_S
    return float(min(LONGEST_S, AGAIN_S * 2 ** min(times_left_out - 2, 30)))


class Returns:
    """Watches the tasks that were left out, for the chief's agent, by its monotonic clock."""

    def __init__(self, times_left_out: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to watch.

        Args:
            times_left_out: how often each task was left out.
            clock: returns the seconds of a clock that never jumps.
        """
        self._times, self._clock = times_left_out, clock
        self._newest: dict[str, tuple[Any, float]] = {}
        """The newest heartbeat of each task, and when it was first seen."""
        self._back_since: dict[str, float] = {}
        self._saved_when_ready: int | None = None

    def due(self, waiting: Mapping[str, Any], saved: int) -> frozenset[str]:
        """Return the tasks to be taken in now; none before the first checkpoint after one of them is ready.

        Args:
            waiting: the tasks that wait to be taken in, each with the time of its newest heartbeat.
            saved: the step of the newest checkpoint, -1 for none.
        """
        now = self._clock()
        for name, beat in waiting.items():
            if name not in self._newest or self._newest[name][0] != beat:
                self._newest[name] = (beat, now)
        here = {name for name in waiting if now - self._newest[name][1] < GONE_S}
        self._back_since = {name: self._back_since.get(name, now) for name in here}
        ready = frozenset(
            name for name, since in self._back_since.items() if now - since >= patience_s(self._times.get(name, 1))
        )
        if not ready:
            self._saved_when_ready = None
        elif self._saved_when_ready is None:
            self._saved_when_ready = saved
        elif saved > self._saved_when_ready:
            self._saved_when_ready = saved  # for the next time, in case they cannot be reached
            return ready
        return frozenset()
