"""The decisions and records of an agent whose program ends: restarts, the outcome, the last heartbeat."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from cluster.agent import rendezvous
from cluster.agent.diagnosis import MemoryKills, describe
from cluster.agent.gang.board import Board
from cluster.agent.members import Members
from cluster.agent.policy import Recovery
from cluster.agent.program import Program
from cluster.agent.standby import Standby
from cluster.agent.watchdog import SILENT_S, Finding, Watchdog
from cluster.contract.recovery import ends
from cluster.contract.recovery.attempts import EXTERNAL, LOST_CONTACT
from cluster.contract.recovery.ends import End
from cluster.contract.results import summary
from cluster.contract.run import membership
from cluster.contract.run.folder import TASK_LOST
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import AfterStop, OutcomeState, TaskState
from cluster.contract.spec import Role
from cluster.system.errors import EXIT_PEER_LOST, EXIT_TIMEOUT, ClusterError

POLL_S = 0.1
PEER_LOST_PATIENCE_S = 3.0
"""How long a task that lost contact waits for the task that really died to report it."""
CULPRIT_PATIENCE_S = 1.0
"""How long a task that failed by itself waits for one that failed before it and whose agent is slower."""
SILENT_HINT_S = 2.0
"""Age of a heartbeat after which its task may have died with its agent and not been brought back yet.

Well under the patience above: a heartbeat is due every second, and may be read half a second late.
"""


class Decisions:
    """The decisions of one task's agent. `Agent` detects their reasons."""

    standby: Standby
    rendezvous_timeout_s: float

    def __init__(self, run: Board, task_name: str) -> None:
        self.run = run
        self.spec = membership.cluster_with_addresses(run)
        self.task = self.spec.task(task_name)
        self.serves = self.spec.serves(self.task)
        self.restarts_alone = self.spec.restarts_alone(self.task)
        self.exit_code: int | None = None
        self.recovery = Recovery(run, self.spec, self.task)
        self.members = Members(run, self.spec, self.task)
        self._memory_kills = MemoryKills()
        self._watchdog: Watchdog
        self._resuming = False
        """Whether the event `resumed` is due once the program trains, after a restart of this task alone."""
        self._pause_s = 0.0
        """How long to wait before the next attempt, if only this task starts again."""

    def _join(self, generation: int) -> None:
        """Take part in the cluster of a generation, which may leave out other tasks."""
        self.spec = self.members.cluster(generation)
        self.recovery = Recovery(self.run, self.spec, self.task)

    @property
    def _on_two_networks(self) -> bool:
        """Whether this task, as a container, is on another network besides its cluster's."""
        return "DEBUGPY_LISTEN" in os.environ

    @property
    def _state(self) -> str:
        """The state in this task's newest heartbeat."""
        beat = self.run.heartbeat(self.task.name)
        return beat.state if beat else ""

    @property
    def _runtime_s(self) -> float:
        """How long a script ran; not needed for a program that records its steps."""
        return 0.0

    def _is_over(self, generation: int) -> bool:
        """Whether this generation's program serves no purpose any more."""
        return self.run.outcome is not None or self.run.generation > generation

    def _wait_until_over(self, generation: int, timeout_s: float = float("inf")) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_over(generation) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _act_on_missing(self, error: ClusterError, generation: int) -> None:
        """Act on a rendezvous that tasks missed, or that this task could not hold."""
        missing = error.missing if isinstance(error, rendezvous.Incomplete) else ()
        if missing and self.members.go_on_without(self.recovery, generation, missing, self.rendezvous_timeout_s):
            return
        if missing and self.members.are_queued_again(generation):
            self.run.request_stop(TASK_LOST, then=AfterStop.REQUEUE)
            self.run.end("stopped", task=self.task.name)
        else:
            name = min(missing, default=self.task.name)
            self.run.end("failed", task=name, exit_code=error.exit_code, error=str(error))

    def _act_on_late(self, late: list[str], generation: int) -> None:
        """End a run all of whose tasks that train are missing: none of them is left to notice it at a rendezvous."""
        error = f"no task joined generation {generation} in {self.rendezvous_timeout_s:g} s: missing {', '.join(late)}"
        self.run.end("failed", task=late[0], exit_code=EXIT_TIMEOUT, error=error)

    def _passed_rendezvous(self, generation: int) -> frozenset[str]:
        """Return the tasks of which an attempt has passed the rendezvous of this generation."""
        complete = ("cluster complete", generation)
        return frozenset(e.task for e in self.run.events() if (e.event, e.generation) == complete)

    def _end_of(self, program: Program, code: int, generation: int) -> End:
        """Return the record of the program's end."""
        out_of_memory = self._memory_kills.include(program, code, self.standby)
        member = self.task in self.spec.members
        lost_contact = code == EXIT_PEER_LOST and member and not self.run.script
        kind = LOST_CONTACT if lost_contact else ends.kind_of(code, out_of_memory=out_of_memory)
        cause = "lost contact with the cluster" if lost_contact else describe(code, out_of_memory=out_of_memory)
        # After a kill for memory the last lines are about something else; exit code 0 is not an error.
        error = None if out_of_memory or code == 0 else program.error(code)
        if code < 0 and error:
            error = f"{cause}: {error}"
        may_follow = lost_contact or (code == -signal.SIGABRT and member)  # TensorFlow aborts when another task dies
        return self.recovery.end(generation, kind, cause, error, may_follow=may_follow, runtime_s=self._runtime_s)

    def _restart_alone(self, end: End) -> None:
        """Start only this task's program again, unless its failure ends the run."""
        self._pause_s = self.recovery.restart_alone(end)
        self._resuming = True

    def _restart_gang(self, generation: int, end: End) -> None:
        """Start every task again, after the others have had time to report that they failed first."""
        ends.record(self.run, generation, end)
        if end.kind == EXTERNAL or not self.spec.members:
            patience_s = 0.0
        else:
            patience_s = PEER_LOST_PATIENCE_S if end.may_follow else CULPRIT_PATIENCE_S
        if self._another_restarts_gang(generation, patience_s):
            return
        if self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        else:
            self.recovery.restart_gang(generation, end)

    def _another_restarts_gang(self, generation: int, patience_s: float) -> bool:
        """Give another failed task time to begin the next generation; longer while one is silent.

        A task that was killed with its agent reports that once it is back. A task that stays silent is the one that
        failed. A script's own error would end the run, so it counts only once all others are seen to be alive.
        """
        if scripted := self.run.script is not None:
            self._watchdog.doubt_others()
        began = time.monotonic()
        deadline = began + patience_s
        while patience_s and not self._is_over(generation) and not self.run.stop_requested:
            name, silent_s = self._watchdog.longest_silent()
            if silent_s > SILENT_S:
                cause = f"no heartbeat for {SILENT_S:.0f} s"
                end = self.recovery.end(generation, EXTERNAL, cause, task=name, at=time.time() - SILENT_S)
                self.recovery.restart_gang(generation, end)
            if silent_s > SILENT_HINT_S:
                if scripted:  # a task that answers again gets as long to report
                    deadline = min(time.monotonic(), began + SILENT_S) + patience_s
            elif time.monotonic() > deadline and (not scripted or self._watchdog.all_are_alive):
                break
            time.sleep(POLL_S)
        return self._is_over(generation)

    def _await_outcome(self, generation: int) -> None:
        """Wait for the outcome of a run whose work is done.

        The chief's agent records it; if that agent stands still, another one does.
        """
        if self.task.role != Role.CHIEF and not self._must_act_for_chief(generation):
            return
        stopped = self._state == "stopped"
        if stopped and self.run.stop_withdrawn(generation):
            left_out = membership.left_out(self.run, generation)
            self.run.begin_generation(generation + 1, resumed=True, left_out=left_out)
        else:
            self.run.end("stopped" if stopped else "succeeded", task=self.task.name)

    def _must_act_for_chief(self, generation: int) -> bool:
        """Wait until the generation is over; return true if the chief's work is done and its agent records nothing.

        A task that becomes silent while this one waits had not finished its work: every task starts again.
        """
        watchdog = self._watchdog = Watchdog(self.run, self.spec, self.task, generation)
        looks = 0
        while not self._is_over(generation):
            if finding := watchdog.examine():
                self._act_on_silence(finding, generation)
            chief = self.run.heartbeat(Role.CHIEF.value)
            done = chief is not None and (chief.state, chief.generation) == (self._state, generation)
            looks = looks + 1 if done else 0
            if looks * POLL_S > SILENT_S:
                return True
            time.sleep(POLL_S)
        return False

    def _act_on_silence(self, finding: Finding, generation: int) -> None:
        """Apply the failure policy to another task that gives no sign of life."""
        self.run.event(finding.task, finding.kind, step=self.run.newest_step, cause=finding.cause)
        at = time.time() - SILENT_S
        self._restart_for(self.recovery.end(generation, EXTERNAL, finding.cause, task=finding.task, at=at), generation)

    def _restart_for(self, end: End, generation: int) -> None:
        """Start every task again, or end a run that is to stop: it cannot save any more."""
        if self.run.stop_requested:
            self.run.end("stopped", task=end.task)
        else:
            self.recovery.restart_gang(generation, end)

    def _finish(self) -> None:
        """Write the last heartbeat; the chief's agent also writes the summary, unless the run continues elsewhere."""
        outcome = self.run.outcome
        assert outcome is not None
        beat = HeartbeatWriter(self.run, self.task, self.run.generation)
        previous = self.run.heartbeat(self.task.name)
        state = TaskState.DONE if outcome.state == OutcomeState.SUCCEEDED else TaskState(outcome.state)
        if not self.members.has(self.run.generation):
            state = TaskState.STOPPED  # the run ended without it
        elif outcome.state == OutcomeState.FAILED and outcome.task != self.task.name:
            # Another task failed: this one's work was done, or it was ended.
            state = TaskState.DONE if previous and previous.state == TaskState.DONE else TaskState.STOPPED
        beat.current = replace(previous or beat.current, state=state, exit_code=self.exit_code, ended=True)
        beat.write()
        self.run.event(self.task.name, state, step=previous.step if previous else None, exit_code=self.exit_code)
        if self.task.role == Role.CHIEF and not self.run.continues_elsewhere:
            summary.write(self.run)
