"""One attempt of a task's program: its process, and the facts that its agent observes of it and of the other tasks."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from cluster.agent import decide
from cluster.agent.board import Board
from cluster.agent.decide import Facts, Phase
from cluster.agent.restarting import Restarter
from cluster.agent.standby import Standby
from cluster.agent.task_process import MemoryKills, TaskProcess, describe_end
from cluster.agent.watchdog import FROZEN_S, SILENT_S, Stall, Watchdog
from cluster.contract import settings
from cluster.contract.recovery import ends
from cluster.contract.recovery.attempt_limits import EXTERNAL, LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.recovery.ends import End
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import TaskState
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.errors import EXIT_PEER_LOST

POLL_S = 0.1
SCRIPT_GRACE_S = settings.seconds("SCRIPT_GRACE_S")
"""Seconds that a script gets to end by itself after SIGTERM, as many as `docker stop` gives. TensorFlow handles SIGTERM
as a notice of preemption, so a script that trains on several tasks only sees it if it asks TensorFlow."""
LONE_RESTART_S = 60.0
"""How long after a worker's restart another script's error counts as its consequence."""


class Attempt:
    """One attempt, in one generation. The agent of a task that was killed has one without a program."""

    def __init__(
        self,
        run: Board,
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
        self.phase = Phase.STARTING
        self.program: TaskProcess
        self.heartbeat: HeartbeatWriter
        """The task's heartbeat until the program writes it."""
        self.began_at = 0.0
        """When the program was let through its gate."""
        self.finding: Stall | None = None
        """A finding before that."""
        self.grace_ends = 0.0
        """When the program has had as long as a script has to end, once asked to."""
        self.end: End | None = None
        self.watch()
        self._rendezvous_timeout_s = rendezvous_timeout_s
        self._standby, self._memory_kills = standby, MemoryKills()
        self._code: int | None = None
        self._others_failed = False
        self._failed_at = self._last_silence_s = self._chief_done_s = 0.0

    @property
    def state(self) -> str:
        """The state in the task's newest heartbeat."""
        beat = self.run.heartbeat(self.task.name)
        return beat.state if beat else ""

    def watch(self) -> None:
        """Begin to watch for tasks that do nothing: time counts from now on."""
        self.watchdog = Watchdog(self.run, self.spec, self.task, self.generation)

    def begin(self, phase: Phase) -> None:
        """Enter a phase."""
        self.phase = phase
        if phase in (Phase.RUNNING, Phase.DONE):
            self.watch()
        elif phase is Phase.FAILED:
            self._failed_at = time.monotonic()
            if self.scripted:
                self.watchdog.suspect_others()

    def observe(self) -> Facts:
        """Return the facts that matter in the present phase."""
        facts = Facts(
            phase=self.phase,
            role=self.task.role,
            scripted=self.scripted,
            restarts_alone=self.restarts_alone,
            serves=self.serves,
            has_peers=bool(self.spec.members),
            is_over=self.run.is_over(self.generation),
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
            case Phase.DIED:
                return replace(facts, state=self.state)

    def _observe_program(self, facts: Facts) -> Facts:
        """Observe the program and, while it runs, the other tasks."""
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
        return replace(facts, grace_is_over=0.0 < self.grace_ends < time.monotonic())

    def _with_finding(self, facts: Facts, finding: Stall, *, stopped: bool = False) -> Facts:
        """Add a finding, and the failure that it shows."""
        if finding.kind == "late":
            return replace(facts, finding=finding)
        kind = EXTERNAL if stopped or finding.kind == "silent" else PROGRAM_FAILURE
        cause = f"{finding.cause}, stopped by a signal" if stopped else finding.cause
        at = time.time() - (SILENT_S if finding.kind == "silent" else FROZEN_S)
        return replace(
            facts, finding=finding, end=self.recovery.end(self.generation, kind, cause, task=finding.task, at=at)
        )

    def _end_of(self, program: TaskProcess, code: int) -> End:
        """Return the record of the program's end."""
        out_of_memory = self._memory_kills.include(program, code, self._standby.kills)
        member = self.task in self.spec.members
        lost_contact = code == EXIT_PEER_LOST and member and not self.scripted
        kind = LOST_CONTACT if lost_contact else ends.kind_of(code, out_of_memory=out_of_memory)
        cause = "lost contact with the cluster" if lost_contact else describe_end(code, out_of_memory=out_of_memory)
        # After a kill for memory the last lines are about something else; exit code 0 is not an error.
        error = None if out_of_memory or code == 0 else program.error(code)
        if code < 0 and error:
            error = f"{cause}: {error}"
        may_follow = lost_contact or (code == -signal.SIGABRT and member)  # TensorFlow aborts when another task dies
        runtime_s = time.monotonic() - self.began_at if self.scripted else 0.0  # a training program records its steps
        return self.recovery.end(self.generation, kind, cause, error, may_follow=may_follow, runtime_s=runtime_s)

    def _observe_others(self, facts: Facts) -> Facts:
        """Observe after a failure whether another task failed before."""
        if decide.is_own_error(facts):
            if self.run.begun(self.generation + 1):  # by its name: a network file system may not list it yet
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
        """Observe after the program's work is done whether the others still work and the chief's is done."""
        facts = replace(facts, state=self.state)
        is_chief = self.task.role == Role.CHIEF
        if not is_chief:
            chief = self.run.heartbeat(Role.CHIEF.value)
            done = chief is not None and (chief.state, chief.generation) == (facts.state, self.generation)
            done &= facts.state in (TaskState.DONE, TaskState.STOPPED)  # a sidecar that died reports neither
            self._chief_done_s = self._chief_done_s + POLL_S if done else 0.0
            facts = replace(facts, chief_done_s=self._chief_done_s)
        finding = self.watchdog.examine() if self.scripted or not is_chief else None
        if finding and finding.task != self.task.name:  # its program has ended
            return self._with_finding(facts, finding)
        if not decide.records_outcome(facts):
            return facts
        if self.scripted:
            training = {task.name for task in self.spec.tasks if not self.spec.serves(task)}
            return replace(facts, all_are_done=training <= self._tasks_in(TaskState.DONE))
        withdrawn = facts.state == TaskState.STOPPED and self.run.folder.stop_withdrawn(self.generation)
        return replace(facts, stop_withdrawn=withdrawn)

    def _tasks_in(self, state: TaskState) -> set[str]:
        beats = self.run.heartbeats().values()
        return {beat.task for beat in beats if (beat.state, beat.generation) == (state, self.generation)}

    def _another_died(self) -> bool:
        """Whether a task reported that it was killed or crashed, and has not begun the next generation yet."""
        others = [end for end in ends.recorded(self.run.folder, self.generation) if end.task != self.task.name]
        return any(not end.may_follow for end in others)

    def _worker_restarted(self) -> bool:
        """Whether a worker was restarted alone shortly before: not every script continues without one.

        A worker's agent writes both the event and its heartbeat, so no clocks of two machines are compared.
        """
        this = ("restarted", self.generation)
        restarted = [event for event in self.run.folder.events() if (event.event, event.generation) == this]
        beats = self.run.heartbeats() if restarted else {}
        return any(beats[e.task].updated_at - e.time < LONE_RESTART_S for e in restarted if e.task in beats)
