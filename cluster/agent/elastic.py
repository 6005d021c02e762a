"""Elastic runs: which tasks a run can continue without, and when tasks that return are taken in.

`leave_out`, `patience_s` and `Returns` decide, on the tasks and the clock that the caller passes; `Members` is an
agent's part. See docs/guides/elastic.md for the policy. Only the chief's agent changes the membership, by beginning a
generation. A task that the generation leaves out runs no program and decides nothing: it sends heartbeats with the
state `waiting` and answers the chief until a generation includes it.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from cluster.agent import rendezvous
from cluster.agent.attempt import Attempt, Restarter
from cluster.agent.decide import LeaveOut, MissedRendezvous
from cluster.agent.run_view import RunView
from cluster.contract import tf_config
from cluster.contract.recovery import attempt_limits
from cluster.contract.recovery.attempt_limits import EXTERNAL
from cluster.contract.recovery.ends import End
from cluster.contract.run import joining, membership
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import AfterStop, TaskState
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.errors import ClusterError
from cluster.system.messages import counted

STEADY_S = 10.0
"""How long a returned task must be back before it is taken in: its host is busy at first."""
AGAIN_S = 60.0
"""The same for a task that was left out twice; each further time doubles it."""
LONGEST_S = 1800.0
GONE_S = 5.0
"""A returned task without a new heartbeat for this long counts as away again."""
TRIES = 3
"""A job is not queued again after this many consecutive generations whose cluster was never complete."""
LOOK_S = 0.5
PROBE_S = 0.5
"""Timeout for a returned task to answer the chief."""
DECISION_S = 5.0
"""Margin that the other tasks add to the time in which the chief's agent has to decide."""


def leave_out(cluster: ClusterSpec, missing: Collection[str], min_workers: int) -> frozenset[str] | None:
    """Return the tasks that the next generation leaves out; None if the run cannot continue without them.

    `cluster` has every requested task; the run needs at least `min_workers` of its workers.
    """
    workers = {task.name for task in cluster.of(Role.WORKER)}
    enough = len(workers - set(missing)) >= min(min_workers, len(workers))
    return frozenset(missing) if enough and set(missing) <= workers else None


def patience_s(times_left_out: int) -> float:
    """Return how long a task must be back before it is taken in: longer for a flapping host."""
    if times_left_out <= 1:
        return STEADY_S
    return float(min(LONGEST_S, AGAIN_S * 2 ** min(times_left_out - 2, 30)))


class Returns:
    """Watches, for the chief's agent, whether tasks that were left out have returned."""

    def __init__(self, times_left_out: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._times, self._clock = times_left_out, clock
        self._newest: dict[str, tuple[Any, float]] = {}
        """The newest heartbeat of each task, and when it was first seen."""
        self._back_since: dict[str, float] = {}
        self._saved_when_ready: int | None = None

    def due(self, waiting: Mapping[str, Any], saved: int) -> frozenset[str]:
        """Return the tasks to take in now. Once a task is ready, it is taken in at the next checkpoint.

        `waiting` maps the tasks that wait to be taken in to the times of their newest heartbeats; `saved` is the step
        of the newest checkpoint, -1 for none.
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


class Members:
    """The membership of the run as one agent sees it, and the agent's part in changing it."""

    def __init__(self, run: RunView, everyone: ClusterSpec, task: Task) -> None:
        self._run, self._everyone, self._task = run, everyone, task
        started = run.folder.started
        self._min_workers, self._grow = started.min_workers, started.grow
        """The number of workers that the run needs, None for all; whether it takes in returning workers."""
        self._decides = self._min_workers is not None and task.role == Role.CHIEF
        self._returns: Returns | None = None
        self._looked = -LOOK_S
        self._waits = False

    def cluster(self, generation: int) -> ClusterSpec:
        """Return the cluster of a generation, with the addresses that this agent knows rather than the folder's."""
        self._returns, self._waits = None, False
        self._look_for_everyone()
        return self._everyone.without(membership.left_out(self._run.folder, generation))

    def _look_for_everyone(self) -> None:
        """Read the current addresses of all tasks, where a scheduler replaces lost tasks on other nodes."""
        if "CLUSTER_JSON" in os.environ:
            self._everyone = membership.cluster_with_addresses(self._run.folder)

    def has(self, generation: int) -> bool:
        return self._task.name not in membership.left_out(self._run.folder, generation)

    def patience_s(self, timeout_s: float, missing: Collection[str]) -> float:
        """Return how long to wait at the rendezvous for the missing tasks.

        Where the chief's agent decides whether the run needs them, the other agents wait longer, for its decision, even
        if they miss only the chief. While the chief's hub is connected, a missing chief is only waiting for others.
        """
        if self._min_workers is None or self._decides:
            return timeout_s
        chief_is_gone = Role.CHIEF.value in missing and not self._run.hub_is_current
        # Unless it is gone, the chief may arrive just before the timeout.
        return (timeout_s if chief_is_gone else 2 * timeout_s) + DECISION_S

    def variables(self, cluster: ClusterSpec) -> dict[str, str]:
        if self._min_workers is None or self._task not in cluster.tasks:
            return {}
        return {"TF_CONFIG": tf_config.dumps(cluster, self._task) or ""}

    def describe_missed(self, generation: int, error: ClusterError, timeout_s: float) -> MissedRendezvous:
        if not isinstance(error, rendezvous.Incomplete):
            return MissedRendezvous(str(error), error.exit_code)
        continuation = self.continue_without(generation, error.missing, timeout_s)
        again = self.are_queued_again(generation)
        return MissedRendezvous(str(error), error.exit_code, min(error.missing), continuation, again)

    def continue_without(self, generation: int, missing: Collection[str], timeout_s: float) -> LeaveOut | None:
        """Return how to continue without missing tasks; None if the run needs them, or if another agent decides."""
        if not self._decides or self._min_workers is None:
            return None
        absent = membership.left_out(self._run.folder, generation) | set(missing)
        if (left_out := leave_out(self._everyone, absent, self._min_workers)) is None:
            return None
        now = counted(len(self._everyone.without(left_out).of(Role.WORKER)), "worker")
        cause = f"{', '.join(sorted(missing))} stayed away for {timeout_s:g} s: the run continues with {now}"
        begun = self._run.generation_record(generation)
        at = begun.failure_time if begun else time.time()
        return LeaveOut(left_out, End(min(missing), EXTERNAL, cause, None, at))

    def are_queued_again(self, generation: int) -> bool:
        """Whether the job is queued again if tasks miss the rendezvous of a generation.

        It is not if the cluster was incomplete in the last few generations, too: other nodes would not help.
        """
        if os.environ.get("LOST_THEN") != AfterStop.REQUEUE:
            return False
        met = {event.generation for event in self._run.folder.events() if event.event == "cluster complete"}
        return generation < TRIES - 1 or bool(met & set(range(generation - TRIES + 1, generation)))

    def meet(self, attempt: Attempt, listener: Task, timeout_s: float) -> None:
        """Hold the rendezvous of an attempt with the other tasks; see `hold_rendezvous` for errors.

        It is abandoned if the attempt has become pointless, or its program has ended or been stopped by a signal.
        """
        generation, program = attempt.generation, attempt.program

        def has_failed() -> bool:
            attempt.finding = None if program.ended else attempt.watchdog.stopped(program.stopped_s)
            return program.ended or attempt.finding is not None

        waiting: dict[str, Any] = {
            "timeout_s": timeout_s,
            "abandon": lambda: self._run.is_over(generation) or attempt.gives_up or has_failed(),
            "report": lambda obstacle: attempt.heartbeat.update(obstacle=obstacle),
        }
        if attempt.restarts_alone and self._task.name in self._passed_rendezvous(generation):
            # The other tasks passed it long ago, and their TensorFlow servers hold their ports. This task's port may
            # still be in use while the kernel frees the memory of the previous program.
            rendezvous.open_task_listener(listener, **waiting).close()
            return
        rendezvous.hold_rendezvous(
            attempt.spec,
            listener,
            self._run,
            generation,
            token=joining.generation_token(self._run.folder, generation),
            # The others do not wait again for a task that restarts alone after they had met it, or for a task that lost
            # its connection to the hub and does not know that all are present.
            passed=partial(self._passed_rendezvous, generation),
            explain=partial(rendezvous.explain_missing, self._run.folder),
            patience=partial(self.patience_s, timeout_s),
            **waiting,
        )
        self._run.folder.event(self._task.name, "cluster complete", generation=generation)

    def _passed_rendezvous(self, generation: int) -> frozenset[str]:
        complete = ("cluster complete", generation)
        return frozenset(e.task for e in self._run.folder.events() if (e.event, e.generation) == complete)

    def take_in_returned(self, recovery: Restarter, generation: int) -> None:
        """Begin a generation that includes the returned tasks, at a checkpoint; to be called often."""
        now = time.monotonic()
        if not self._decides or now - self._looked < LOOK_S or not self._grow:
            return
        self._looked = now
        if not (left_out := membership.left_out(self._run.folder, generation)):
            return
        saved, own = max(self._run.folder.saved_steps, default=-1), self._run.heartbeat(self._task.name)
        if own and own.steps_total and max(own.step, saved) >= own.steps_total:
            return  # only the last evaluation and the export are left, which a restart would repeat
        if self._returns is None:
            self._returns = Returns(membership.times_left_out(self._run.folder))
        waiting = {
            name: beat.updated_at
            for name in left_out
            if (beat := self._run.heartbeat(name)) and (beat.state, beat.generation) == (TaskState.WAITING, generation)
        }
        if not (due := self._returns.due(waiting, saved)):
            return
        self._look_for_everyone()
        token = joining.generation_token(self._run.folder, generation)
        back = {n for n in due if not rendezvous.dial(self._task, self._everyone.task(n), token, PROBE_S)}
        if back and not self._run.stop_requested:
            end = End(min(back), EXTERNAL, f"{', '.join(sorted(back))} returned and is taken in", None, time.time())
            recovery.change_members(generation, left_out - back, end, "taken in")

    def await_turn(self, generation: int, is_over: Callable[[], bool], listener: Task) -> None:
        """Wait, as a task that this generation leaves out, until the generation is over."""
        restarts = attempt_limits.count_restarts(self._run.folder, self._task.name)
        heartbeat = HeartbeatWriter(self._run.folder, self._task, generation, restarts).start()
        heartbeat.update(state=TaskState.WAITING)
        if not self._waits:
            self._run.folder.event(self._task.name, "returned", generation=generation)
            self._waits = True
        try:
            rendezvous.await_turn(
                listener,
                token=joining.generation_token(self._run.folder, generation),
                abandon=is_over,
                report=lambda obstacle: heartbeat.update(obstacle=obstacle),
            )
        except rendezvous.Abandoned:
            pass
        except rendezvous.PortTaken as error:
            heartbeat.update(obstacle=str(error))
            while not is_over():
                time.sleep(LOOK_S)
        finally:
            heartbeat.stop()
