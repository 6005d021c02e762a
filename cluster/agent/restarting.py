"""The failure policy: whether the gang or one task starts again after a failure, or the run ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from typing import Any

from cluster.agent.board import Board
from cluster.contract.recovery import attempt_limits, ends, standby_cluster, step_record
from cluster.contract.recovery.attempt_limits import EXTERNAL, LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.recovery.ends import End
from cluster.contract.run import membership
from cluster.contract.run.records import EndedAttempt
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.errors import EXIT_FAILED
from cluster.system.messages import counted


class Restarter:
    """Decides for the agent of one task whether a failed program starts again, and records the decision."""

    def __init__(self, run: Board, spec: ClusterSpec, task: Task) -> None:
        self._run = run
        self._spec = spec
        self._task = task

    def end(
        self,
        generation: int,
        kind: str,
        cause: str,
        error: str | None = None,
        *,
        task: str = "",
        at: float | None = None,
        runtime_s: float = 0.0,
        may_follow: bool = False,
    ) -> End:
        """Return the record of the end of this task, or of the one named, with the last step that it did."""
        name = task or self._task.name
        last_step = self._last_step(self._spec.task(name), generation)
        host = socket.gethostname() if name == self._task.name else self._spec.task(name).host
        return End(name, kind, cause, error, time.time() if at is None else at, last_step, runtime_s, may_follow, host)

    def _last_step(self, task: Task, generation: int) -> int:
        """Return the last step in a task's own record; others may have done one more."""
        if task.role == Role.EVALUATOR:
            beat = self._run.heartbeat(task.name)
            return beat.step if beat else -1
        if self._spec.restarts_alone(task):  # written by the chief, in whatever generation
            progress = step_record.read(self._run.folder, task.name)
            return progress.step if progress else -1
        return step_record.last_step(self._run.folder, "chief" if self._spec.serves(task) else task.name, generation)

    def restart_gang(self, generation: int, own: End) -> None:
        """Begin the next generation, in which every task starts again, unless the run has failed too often."""
        if self._run.outcome or self._run.generation > generation:
            return  # another agent has acted on this failure
        run, end = self._run, ends.root_cause(self._run.folder, generation, own)
        saved = max(run.folder.saved_steps, default=-1)
        tried = [*attempt_limits.of_gang(run.folder, generation), _attempt(end, saved)]
        if count := attempt_limits.too_many(tried, *attempt_limits.limits(run.folder)):
            self._fail(end, count)
            return
        step = max(run.newest_step, step_record.newest(run.folder, generation))
        # A task that is reported by another is silent: its standby process is ready, but nobody would open its gate.
        complete = own.task == self._task.name and standby_cluster.complete(run.folder, self._spec, generation)
        began = run.begin_generation(
            generation + 1,
            **self._failure(generation, end, step, saved),
            error=end.error,
            pause_s=attempt_limits.pause_s(tried),
            left_out=membership.left_out(run.folder, generation),
            standby_ports=1 - standby_cluster.ports(run.folder, generation) if complete else None,
        )
        if began:
            run.folder.event(end.task, "gang restart", step=step, cause=end.cause, error=end.error)

    def change_members(self, generation: int, left_out: Collection[str], end: End, event: str) -> None:
        """Begin the next generation without these tasks, for the reason `end`; this never counts as a failure."""
        run = self._run
        step = max(run.newest_step, step_record.newest(run.folder, generation), 0)
        record = self._failure(generation, end, step, max(run.folder.saved_steps, default=-1))
        record["kind"] = attempt_limits.PLANNED
        if run.begin_generation(generation + 1, **record, left_out=frozenset(left_out)):
            run.folder.event(end.task, event, step=step, cause=end.cause)

    def restart_alone(self, end: End) -> float:
        """Record that this task restarts alone, unless it has failed too often; return how long to pause before.

        An evaluator never fails the run.
        """
        tried = [*attempt_limits.of_task(self._run.folder, self._task.name), _attempt(end)]
        count = attempt_limits.too_many(tried, *attempt_limits.limits(self._run.folder))
        if count and self._task.role != Role.EVALUATOR:
            self._fail(end, count)
            return 0.0
        pause_s = attempt_limits.pause_s(tried)
        detail = {
            "cause": end.cause,
            "error": end.error,
            "failed_at": end.at,
            "pause_s": pause_s,
            **_attempt(end).to_json(),
        }
        self._run.folder.event(self._task.name, "restarted", step=self._run.newest_step, **detail)
        return pause_s

    def _failure(self, generation: int, end: End, step: int, saved: int) -> dict[str, Any]:
        """Return the fields of the next generation about the end of this one."""
        return {
            "task": end.task,
            "cause": end.cause,
            "step": step,
            "failed_at": end.at,
            "kind": end.kind,
            "last_step": end.last_step,
            "saved": saved,
            "runtime_s": round(end.runtime_s, 3),
            "single_steps_from": self._single_steps_from(generation, end),
        }

    def _single_steps_from(self, generation: int, end: End) -> int | None:
        """Return the step from which the next generation runs single steps.

        After a kill, or a failure before any step, that is the same step as in this generation.
        """
        if end.kind in (PROGRAM_FAILURE, LOST_CONTACT) and end.last_step >= 0:
            return end.last_step
        begun = self._run.begun(generation)
        return begun.single_steps_from if begun else None

    def _fail(self, end: End, count: int) -> None:
        """End the run because it has failed too often."""
        step = end.last_step
        if step < 0:  # it did no step in this attempt: use the others' steps
            step = max(self._run.newest_step, step_record.newest(self._run.folder, self._run.generation), 0)
        after = f" after step {step}" if step else ""
        verb, where = ("failed", "") if end.kind != EXTERNAL else ("ended from outside", f" on {end.host}")
        error = f"{verb} {counted(count, 'time')} without progress{after}{where}: {end.reported}"
        self._run.end("failed", task=end.task, exit_code=EXIT_FAILED, step=step, error=error)


def _attempt(end: End, saved: int = -1) -> EndedAttempt:
    return EndedAttempt(end.kind, end.last_step, saved, round(end.runtime_s, 3))
