"""One attempt of a task's program: its process, the facts its agent observes, and the start of the next attempt."""

import signal
import socket
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from cluster.agent import decide, rendezvous
from cluster.agent.decide import Facts, MissedRendezvous, Phase
from cluster.agent.run_view import RunView
from cluster.agent.standby import Standby
from cluster.agent.task_process import MemoryKills, TaskProcess, describe_end
from cluster.agent.watchdog import FROZEN_S, SILENT_S, Stall, Watchdog
from cluster.contract import settings
from cluster.contract.recovery import attempt_limits, ends, standby_cluster, step_record
from cluster.contract.recovery.attempt_limits import EXTERNAL, LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.recovery.ends import End
from cluster.contract.run import membership
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import EndedAttempt, OutcomeState, TaskState
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_PEER_LOST
from cluster.system.messages import counted

GRACE_S = 40.0
"""Grace period in which a program can save and end by itself, in seconds. The engine's own is longer."""
NOTHING_TO_SAVE = (TaskState.STARTING, TaskState.WAITING, TaskState.RESTARTING)
POLL_S = 0.1
SAVE_S = 20.0
"""How long after a stop request the tasks may take to start again after a failure, in order to save."""
SCRIPT_GRACE_S = settings.seconds("SCRIPT_GRACE_S")
"""Grace period of a script after SIGTERM, in seconds; the default is that of `docker stop`. TensorFlow takes SIGTERM as
a preemption notice, so a script that trains on several tasks only notices it by asking TensorFlow."""
LONE_RESTART_S = 60.0
"""How long after a worker's restart another script's error counts as a consequence of the restart."""


class Attempt:
    """One attempt, in one generation. It has no program if the agent only reports that the whole task was killed."""

    def __init__(
        self,
        run: RunView,
        spec: ClusterSpec,
        task: Task,
        generation: int,
        *,
        scripted: bool,
        rendezvous_timeout_s: float,
        standby: Standby,
    ) -> None:
        self.run, self.spec, self.task, self.generation = run, spec, task, generation
        self.scripted = scripted
        self.restarts_alone = spec.restarts_alone(task)
        self.serves = spec.serves(task)
        self.recovery = Restarter(run, spec, task)
        self.program: TaskProcess
        self.heartbeat: HeartbeatWriter
        """Writes the task's heartbeat until the program takes over."""
        self.pause_ends = 0.0
        self.missed: MissedRendezvous | None = None
        self.began_at = 0.0
        """When the gate was about to be opened, by the monotonic clock."""
        self.finding: Stall | None = None
        """A stall found before the gate was opened."""
        self.grace_ends = 0.0
        """When the grace period after a stop request ends, by the monotonic clock; 0 before a request."""
        self.end: End | None = None
        self.poll_s = POLL_S if task.role == Role.CHIEF else POLL_S * rendezvous.larger(len(spec.tasks))
        """How often to observe a program that runs. Agents that share a machine take its time from those that start."""
        self._rendezvous_timeout_s = rendezvous_timeout_s
        self._standby = standby
        self.begin(Phase.STARTING)
        self._code: int | None = None
        self._others_failed = False
        self._failed_at = self._last_silence_s = self._chief_done_s = 0.0
        self._chief_seen_at = time.monotonic()

    @property
    def state(self) -> str:
        beat = self.run.heartbeat(self.task.name)
        return beat.state if beat else ""

    @property
    def grace_s(self) -> float:
        """Seconds to save in; 0 after a failure, as the other tasks hang in a step; at most 1 with nothing to save."""
        outcome, grace_s = self.run.outcome, GRACE_S
        if self.serves or not outcome or outcome.state == OutcomeState.FAILED:
            return 0.0
        if self.scripted:  # counted from the stop request, even if another script ended first
            grace_s = max(0.0, self.grace_ends - time.monotonic()) if self.grace_ends else SCRIPT_GRACE_S
        elif self.task.role == Role.EVALUATOR and not self.run.continues_elsewhere:
            grace_s = self.watchdog.slow_timeout_s
            if self.run.folder.saved_steps:  # it evaluates the last one, even if it has only just started
                return grace_s
        return min(grace_s, 1.0) if self.state in NOTHING_TO_SAVE else grace_s

    @property
    def is_unsaved(self) -> bool:
        """Whether the tasks' memory has steps that no checkpoint has, and a stop still has time to save them."""
        if self.scripted or not self.spec.kind.synchronous or self.run.stop_s > SAVE_S:
            return False
        beat = self.run.heartbeat(Role.CHIEF.value if self.task.role.is_sidecar else self.task.name)
        newest = max([beat.step if beat else 0, *(begun.step for begun in self.run.folder.generations())])
        keeps = self.run.folder.load_config().get("memory_snapshots")
        return bool(keeps) and newest > max(self.run.folder.saved_steps, default=0)

    @property
    def gives_up(self) -> bool:
        """Whether a stop ends the run before the program has started, as there is nothing to save."""
        return self.run.stop_requested and not self.is_unsaved

    def request_end(self) -> None:
        """Ask the program to save and end; a script's grace period begins with the first request."""
        if self.state not in NOTHING_TO_SAVE or not self.is_unsaved:  # otherwise it checks for a request as it starts
            self.program.request_end()
        self.grace_ends = self.grace_ends or time.monotonic() + SCRIPT_GRACE_S

    def watch(self) -> None:
        """Start a new watchdog, which measures stalls from now on."""
        self.watchdog = Watchdog(self.run, self.spec, self.task, self.generation)

    def begin(self, phase: Phase) -> None:
        self.phase = phase
        if phase in (Phase.STARTING, Phase.RUNNING, Phase.DONE):
            self.watch()
        if phase is Phase.STARTING:
            self._memory_kills = MemoryKills()
        elif phase is Phase.FAILED:
            self._failed_at = time.monotonic()
            if self.scripted:
                self.watchdog.suspect_others()

    def observe(self) -> Facts:
        """Return the facts that are relevant in the current phase."""
        facts = self._observe()
        works = facts.phase is Phase.DONE or (facts.phase is Phase.RUNNING and facts.code is None)
        if facts.stop_requested and (facts.finding or not works):  # otherwise many agents would read files in vain
            facts = replace(facts, is_unsaved=self.is_unsaved)
        return facts

    def _observe(self) -> Facts:
        facts = Facts(
            phase=self.phase,
            role=self.task.role,
            scripted=self.scripted,
            restarts_alone=self.restarts_alone,
            serves=self.serves,
            has_peers=bool(self.spec.members),
            is_over=self.run.is_over(self.generation),
            pause_is_over=time.monotonic() >= self.pause_ends,
            missed=self.missed,
            code=self._code,
            end=self.end,
            others_failed=self._others_failed,
        )
        if facts.is_over:
            return facts
        facts = replace(facts, stop_requested=self.run.stop_requested)
        match self.phase:
            case Phase.STARTING | Phase.RUNNING:
                return self._observe_program(facts)
            case Phase.FAILED:
                return self._observe_others(facts)
            case Phase.DONE:
                return self._observe_work(facts)
            case Phase.PAUSED:
                return self._observe_chief(replace(facts, state=self.state))
            case Phase.INCOMPLETE | Phase.DIED:
                return replace(facts, state=self.state)

    def _observe_program(self, facts: Facts) -> Facts:
        program, finding = self.program, self.finding
        if not finding and program.ended:
            self._code = program.wait()
            self._others_failed = self.scripted and bool(self._tasks_in(TaskState.FAILED) - {self.task.name})
            self.end = self._end_of(program, self._code)
            return replace(facts, state=self.state, code=self._code, end=self.end, others_failed=self._others_failed)
        if not finding and self.phase is Phase.RUNNING:
            finding = self.watchdog.examine(program.stopped_s)
            if not finding and self.task.role.is_sidecar:
                finding = self.watchdog.late(self._rendezvous_timeout_s)
        if finding:
            stopped = finding.stopped or (finding.kind == "frozen" and program.is_stopped)
            return self._with_finding(facts, finding, stopped=stopped)
        if self.phase is Phase.RUNNING and (self.serves or self.task.role == Role.EVALUATOR):
            facts = self._observe_chief(facts)
        return replace(facts, grace_is_over=0.0 < self.grace_ends < time.monotonic())

    def _with_finding(self, facts: Facts, finding: Stall, *, stopped: bool = False) -> Facts:
        if finding.kind == "late":
            return replace(facts, finding=finding)
        kind = EXTERNAL if stopped or finding.kind == "silent" else PROGRAM_FAILURE
        cause = f"{finding.cause}, stopped by a signal" if stopped else finding.cause
        cause = self.watchdog.describe_late(cause, *([] if finding.kind == "hang" else [finding.task]))
        at = time.time() - (SILENT_S if finding.kind == "silent" else FROZEN_S)
        end = self.recovery.end(self.generation, kind, cause, task=finding.task, at=at)
        return replace(facts, finding=finding, end=end)

    def _end_of(self, program: TaskProcess, code: int) -> End:
        out_of_memory = self._memory_kills.include(program, code, self._standby.kills)
        member = self.task in self.spec.members
        lost_contact = code == EXIT_PEER_LOST and member and not self.scripted
        kind = LOST_CONTACT if lost_contact else ends.classify_code(code, out_of_memory=out_of_memory)
        cause = "lost contact with the cluster" if lost_contact else describe_end(code, out_of_memory=out_of_memory)
        cause = self.watchdog.describe_late(cause) if lost_contact else cause
        # After an out-of-memory kill the last lines do not explain the end; exit code 0 is not an error.
        error = None if out_of_memory or code == 0 else program.error(code)
        if code < 0 and error:
            error = f"{cause}: {error}"
        aborted = (-signal.SIGABRT,) if self.scripted else (-signal.SIGABRT, EXIT_CANCELLED)  # or another task died
        may_follow = lost_contact or (member and code in aborted)
        runtime_s = time.monotonic() - self.began_at if self.scripted else 0.0  # a training program records its steps
        return self.recovery.end(self.generation, kind, cause, error, may_follow=may_follow, runtime_s=runtime_s)

    def _observe_others(self, facts: Facts) -> Facts:
        if decide.is_own_error(facts):
            # Looked up by name: a network file system may not list it yet.
            if self.run.generation_record(self.generation + 1):
                return replace(facts, is_over=True)
            facts = replace(facts, another_died=self._another_died(), worker_restarted=self._worker_restarted())
        if not decide.patience_s(facts):
            return facts
        name, silent_s = self.watchdog.longest_silent()
        if silent_s > SILENT_S:
            return self._with_finding(facts, Stall(name, f"no heartbeat for {SILENT_S:.0f} s", "silent"))
        failed_s = time.monotonic() - self._failed_at
        if silent_s > decide.SILENT_HINT_S:
            self._last_silence_s = failed_s
        return replace(
            facts,
            failed_s=failed_s,
            silent_s=silent_s,
            last_silence_s=self._last_silence_s,
            all_are_alive=not self.scripted or self.watchdog.all_are_alive,
        )

    def _observe_work(self, facts: Facts) -> Facts:
        """Observe, once the program's work is done, whether other tasks stall and whether the chief's work is done."""
        facts = self._observe_chief(replace(facts, state=self.state))
        finding = self.watchdog.examine() if self.scripted or self.task.role != Role.CHIEF else None
        if finding and finding.task != self.task.name:  # this task's program has ended
            return self._with_finding(facts, finding)
        return facts

    def _observe_chief(self, facts: Facts) -> Facts:
        """Observe how long the chief's work has been done without an outcome, and which outcome is to be recorded."""
        if self.task.role != Role.CHIEF:
            chief = self.run.heartbeat(Role.CHIEF.value)
            state = ""
            if chief and chief.generation == self.generation and chief.state in (TaskState.DONE, TaskState.STOPPED):
                state = chief.state
            # A sidecar that died, or a program that never ends by itself, reports neither state.
            if self.phase is Phase.DONE and not self.task.role.is_sidecar and state != facts.state:
                state = ""
            now = time.monotonic()
            passed_s = min(now - self._chief_seen_at, self.poll_s)  # not the time for which this agent was frozen
            self._chief_done_s, self._chief_seen_at = self._chief_done_s + passed_s if state else 0.0, now
            facts = replace(facts, chief_done_s=self._chief_done_s, chief_state=state)
        if not decide.records_outcome(facts):
            return facts
        if self.scripted:
            training = {task.name for task in self.spec.tasks if not self.spec.serves(task)}
            stopped = self._tasks_in(TaskState.STOPPED)  # on a request that this host may not see yet
            all_are_done = training <= self._tasks_in(TaskState.DONE) | stopped
            return replace(facts, stop_requested=facts.stop_requested or bool(stopped), all_are_done=all_are_done)
        withdrawn = TaskState.STOPPED in (facts.state, facts.chief_state)
        return replace(facts, stop_withdrawn=withdrawn and self.run.folder.stop_withdrawn(self.generation))

    def _tasks_in(self, state: TaskState) -> set[str]:
        beats = self.run.heartbeats().values()
        return {beat.task for beat in beats if (beat.state, beat.generation) == (state, self.generation)}

    def _another_died(self) -> bool:
        """Whether another task has reported that it was killed or crashed, and not because of another task's end."""
        folder, generation = self.run.folder, self.generation
        found = ends.recorded_ends(folder, generation)
        # A task's heartbeat is visible before this host's network file system lists the record of its end.
        failed = (ends.recorded_end(folder, generation, name) for name in self._tasks_in(TaskState.FAILED))
        found += filter(None, failed)
        return any(not end.may_follow for end in found if end.task != self.task.name)

    def _worker_restarted(self) -> bool:
        """Whether a worker was restarted alone shortly before: some scripts fail while a worker is missing.

        A worker's agent writes both the event and the heartbeat, so both times are from the same machine's clock.
        """
        this = ("restarted", self.generation)
        restarted = [event for event in self.run.folder.events() if (event.event, event.generation) == this]
        beats = self.run.heartbeats() if restarted else {}
        return any(beats[e.task].updated_at - e.time < LONE_RESTART_S for e in restarted if e.task in beats)


class Restarter:
    """Decides for the agent of one task whether a failed program starts again, and records the decision."""

    def __init__(self, run: RunView, spec: ClusterSpec, task: Task) -> None:
        self._run, self._spec, self._task = run, spec, task

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
        """Return the record of a task's end, with its last step; `task` defaults to the agent's own task."""
        name = task or self._task.name
        last_step = self._last_step(self._spec.task(name), generation)
        host = socket.gethostname() if name == self._task.name else self._spec.task(name).host
        return End(name, kind, cause, error, time.time() if at is None else at, last_step, runtime_s, may_follow, host)

    def _last_step(self, task: Task, generation: int) -> int:
        """Return the last step in a task's own record; other tasks may be one step ahead."""
        if task.role == Role.EVALUATOR:
            beat = self._run.heartbeat(task.name)
            return beat.step if beat else -1
        if self._spec.restarts_alone(task):  # the chief writes the record, in any generation
            progress = step_record.read_step(self._run.folder, task.name)
            return progress.step if progress else -1
        return step_record.last_step(self._run.folder, "chief" if self._spec.serves(task) else task.name, generation)

    def restart_gang(self, generation: int, own: End) -> None:
        """Restart every task by beginning the next generation, unless the run has failed too often."""
        if self._run.outcome or self._run.generation > generation:
            return  # another agent has acted on this failure
        run, end = self._run, ends.root_cause(self._run.folder, generation, own)
        saved = max(run.folder.saved_steps, default=-1)
        tried = [*attempt_limits.attempts_of_gang(run.folder, generation), _attempt(end, saved)]
        if count := attempt_limits.count_over_limit(tried, *attempt_limits.restart_limits(run.folder)):
            self._fail(end, count)
            return
        step = max(run.newest_step, step_record.newest_step(run.folder, generation))
        # If the failed task is silent, its standby process may be ready, but no agent would open the gate.
        complete = own.task == self._task.name and standby_cluster.is_complete(run.folder, self._spec, generation)
        began = run.begin_generation(
            generation + 1,
            **self._failure(generation, end, step, saved),
            error=end.error,
            pause_s=attempt_limits.pause_s(tried),
            left_out=membership.left_out(run.folder, generation),
            standby_ports=1 - standby_cluster.port_set(run.folder, generation) if complete else None,
        )
        if began:
            run.folder.event(end.task, "gang restart", step=step, cause=end.cause, error=end.error)

    def change_members(self, generation: int, left_out: Collection[str], end: End, event: str) -> None:
        """Begin the next generation without `left_out`, for the reason in `end`; this never counts as a failure."""
        run = self._run
        step = max(run.newest_step, step_record.newest_step(run.folder, generation), 0)
        record = self._failure(generation, end, step, max(run.folder.saved_steps, default=-1))
        record["kind"] = attempt_limits.PLANNED
        if run.begin_generation(generation + 1, **record, left_out=frozenset(left_out)):
            run.folder.event(end.task, event, step=step, cause=end.cause)

    def restart_alone(self, end: End) -> float:
        """Record that this task restarts alone, unless it has failed too often; return the back-off in seconds.

        An evaluator never fails the run.
        """
        tried = [*attempt_limits.attempts_of_task(self._run.folder, self._task.name), _attempt(end)]
        count = attempt_limits.count_over_limit(tried, *attempt_limits.restart_limits(self._run.folder))
        if count and self._task.role != Role.EVALUATOR:
            self._fail(end, count)
            return 0.0
        pause_s = attempt_limits.pause_s(tried)
        detail = _attempt(end).to_json() | {"cause": end.cause, "error": end.error}
        detail |= {"failed_at": end.at, "pause_s": pause_s}
        self._run.folder.event(self._task.name, "restarted", step=self._run.newest_step, **detail)
        return pause_s

    def _failure(self, generation: int, end: End, step: int, saved: int) -> dict[str, Any]:
        """Return the part of the next generation's record that describes the end of this generation."""
        begun = self._run.generation_record(generation)
        single_steps_from = begun.single_steps_from if begun else None
        if end.kind in (PROGRAM_FAILURE, LOST_CONTACT) and end.last_step >= 0:
            single_steps_from = end.last_step
        failure = {"task": end.task, "cause": end.cause, "step": step, "failed_at": end.at}
        return _attempt(end, saved).to_json() | failure | {"single_steps_from": single_steps_from}

    def _fail(self, end: End, count: int) -> None:
        step = end.last_step
        if step < 0:  # no step in this attempt: use the other tasks' steps
            step = max(self._run.newest_step, step_record.newest_step(self._run.folder, self._run.generation), 0)
        after = f" after step {step}" if step else ""
        verb, where = ("failed", "") if end.kind != EXTERNAL else ("ended from outside", f" on {end.host}")
        error = f"{verb} {counted(count, 'time')} without progress{after}{where}: {end.reported}"
        self._run.end("failed", task=end.task, exit_code=EXIT_FAILED, step=step, error=error)


def _attempt(end: End, saved: int = -1) -> EndedAttempt:
    return EndedAttempt(end.kind, end.last_step, saved, round(end.runtime_s, 3))
