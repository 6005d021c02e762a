"""The first process of every task: starts the task's program, watches it and the gang, applies the failure policy.

    python -m cluster.agent [-- COMMAND ...]               RUN_DIR, TASK and TF_CONFIG in the environment
    python -m cluster.agent --script FILE [ARGUMENT ...]   the same for a script, see cluster/agent/script.py

The program is started at once, so that its imports run while the agents hold their rendezvous, and waits at its gate
(the pipe whose descriptor is `GATE_FD`) until the cluster is complete. What dies, and what happens then:

    chief, worker (synchronous), ps      a new generation: every agent ends its program and starts it again
    worker (parameter server), evaluator only that program starts again
    frozen, or no new step               as if it had died; see cluster/agent/watchdog.py
    exit code 1 to 4                     the program knows that trying again is useless: the run fails (never the
                                         evaluator's doing, which starts again after growing pauses)
    failing by itself without progress   after `--max-restarts` times the run fails; see cluster/recovery/attempts.py

Agents know each other only through the run folder, so this works the same under any engine that restarts a task whose
agent dies. The agent itself exits 0 once the outcome is recorded: anything else would have the engine start it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from cluster.agent import rendezvous
from cluster.agent.program import Program, Trainer
from cluster.agent.standby import Standby
from cluster.agent.watchdog import FROZEN_S, SILENT_S, Finding, Watchdog
from cluster.errors import EXIT_FAILED, EXIT_PEER_LOST, EXIT_TIMEOUT, ClusterError
from cluster.recovery import attempts, ends, step_record
from cluster.recovery.attempts import LOST_CONTACT, OUTSIDE, OWN
from cluster.recovery.ends import End
from cluster.recovery.policy import Recovery
from cluster.results import summary
from cluster.run.folder import RunFolder
from cluster.run.heartbeat import Heartbeat
from cluster.run.logs import last_line
from cluster.spec import Role, Task
from cluster.system import memory, processes
from cluster.system.json_files import write_json
from cluster.system.processes import as_exit_code, describe_exit, identity

GRACE_S = 40.0
"""Seconds that a program gets to save and end by itself. The engine's own grace period is longer."""
NOTHING_TO_SAVE = ("starting", "waiting", "restarting")
POLL_S = 0.1
PEER_LOST_PATIENCE_S = 3.0
"""How long a task that lost contact waits for the task that really died to say so: that one is the culprit."""
CULPRIT_PATIENCE_S = 1.0
"""How long a task that failed by itself waits for one that failed before it, and whose agent is slower."""
SILENT_HINT_S = 3.0
"""Age of a heartbeat after which its task may be dead, agent and all, and not yet brought back."""
SERVERS_S = 120.0
"""Longest wait for the TensorFlow servers of the tasks that this one calls: until their imports are done."""
STACKS_S = 1.0
"""How long the programs of a hanging gang get to show their stacks."""


class Agent:
    """Runs one task from its start to the run's outcome."""

    def __init__(self, run: RunFolder, task_name: str, command: list[str], barrier_timeout_s: float) -> None:
        self.run = run
        self.spec = run.load_cluster()
        self.task = self.spec.task(task_name)
        self.command = command
        self.barrier_timeout_s = barrier_timeout_s
        self.serves = self.spec.serves(self.task)
        self.alone = self.spec.restarts_alone(self.task)
        self.resumes = False
        self.exit_code: int | None = None
        self.standby = Standby(self._program, self.spec.tasks.index(self.task), len(self.spec.tasks))
        self._kills_before = memory.kills()
        self._began_s = time.monotonic()
        self._watchdog = Watchdog(run, self.spec, self.task, run.generation)
        self.recovery = Recovery(run, self.spec, self.task)
        self._pause_s = 0.0
        """How long to wait before the next life, where only this task starts again."""
        self._lived_in = -1
        """The generation of the newest life."""

    def main(self) -> int:
        """Live generation after generation until the run has an outcome."""
        signal.signal(signal.SIGTERM, lambda *_: self.run.request_stop(self.task.name))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `invoke up` turns a Ctrl-C into a request to stop
        self._notice_own_death()
        while not self.run.outcome:
            self._live(self.run.generation)
        self.standby.end()
        self._finish()
        return 0

    def _notice_own_death(self) -> None:
        """An agent that finds itself already in this generation was brought back by the engine: the task died."""
        beat = self.run.heartbeat(self.task.name)
        if not beat or beat["generation"] != self.run.generation or "importing" in beat:
            return
        finished = beat["state"] in ("done", "stopped")
        self.exit_code = beat.get("exit_code", 0 if finished else as_exit_code(-signal.SIGKILL))
        if self.run.outcome:
            return
        self._lived_in = generation = beat["generation"]
        if finished:
            self._await_outcome(generation)
        elif self.run.stop_requested and not self.alone:
            self.run.end("stopped", task=self.task.name)
        else:
            end = self.recovery.end(generation, OUTSIDE, "the whole task was killed", at=beat["updated_at"])
            if self.alone:
                self._restart_alone(end)
            else:
                ends.record(self.run, generation, end)
                self.recovery.restart_gang(generation, end)

    def _live(self, generation: int) -> None:
        """Run the program once in this generation, and act on its end."""
        again = attempts.restarts(self.run, self.task.name)
        heartbeat = Heartbeat(self.run, self.task, generation, again).start()
        if not self._pause(heartbeat, generation):
            heartbeat.stop()
            return
        life = {"GENERATION": str(generation), "RESTARTS": str(again)}
        self.run.programs(self.task.name).unlink(missing_ok=True)  # those of the life before
        program = self.standby.take() or self._program(os.environ | life)
        self._kills_before, self._began_s = memory.kills(), time.monotonic()
        self._watchdog = Watchdog(self.run, self.spec, self.task, generation)
        try:
            if self._meet(program, heartbeat, generation):
                self._begin(program, heartbeat, life)
                with contextlib.suppress(OSError):  # on a full disk
                    pids = {"agent": os.getpid(), "program": program.pid}
                    write_json(self.run.programs(self.task.name), {which: identity(pid) for which, pid in pids.items()})
                self._watch(program, generation)
        finally:
            heartbeat.stop()
            code = as_exit_code(program.end(self._grace_s()))
            outcome = self.run.outcome
            at_fault = outcome and (outcome["state"], outcome.get("task")) == ("failed", self.task.name)
            self.exit_code = 0 if self.serves and outcome and not at_fault else code

    def _pause(self, heartbeat: Heartbeat, generation: int) -> bool:
        """Wait before a program that failed by itself is started again; return whether it is to be started."""
        if generation != self._lived_in:
            self._pause_s = float(step_record.began(self.run, generation).get("pause_s", 0.0))
        seconds, self._pause_s, self._lived_in = self._pause_s, 0.0, generation
        if not seconds:
            return True
        heartbeat.update(state="restarting")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._over(generation) and not self.run.stop_requested:
            time.sleep(POLL_S)
        if self.run.stop_requested and self.task.role == Role.EVALUATOR:
            self._wait_until_over(generation, float("inf"))  # it has nothing to save
        elif self.run.stop_requested and not self.alone:
            self.run.end("stopped", task=self.task.name)
        return not self._over(generation)  # a worker that stops helps the chief to save

    def _program(self, environment: dict[str, str]) -> Program:
        """Return this generation's program, which forms no cluster before `_begin`."""
        return Trainer(self.command, environment, self.run.log(self.task.name))

    def _begin(self, program: Program, heartbeat: Heartbeat, life: dict[str, str]) -> None:
        """Let the program form its cluster. It writes the heartbeat itself once its imports, however slow, are done."""
        heartbeat.hand_over()
        if self.task in self.spec.members:
            generation = int(life["GENERATION"])
            rendezvous.await_servers(
                self.spec.calls_first(self.task),
                timeout_s=SERVERS_S,
                abandon=lambda: self._over(generation) or self.run.stop_requested or program.ended,
            )
        program.open_gate(life)

    def _grace_s(self) -> float:
        """Seconds to save in: none where a task failed (the others hang in the step that it left) or nothing trains."""
        outcome = self.run.outcome
        if self.serves or not outcome or outcome["state"] == "failed":
            return 0.0
        return 1.0 if self._state in NOTHING_TO_SAVE else GRACE_S

    def _meet(self, program: Program, heartbeat: Heartbeat, generation: int) -> bool:
        """Hold the rendezvous with the other tasks; return whether the program may go on."""
        if self.task.role == Role.EVALUATOR:
            return True
        heartbeat.update(state="waiting")
        others_wait: rendezvous.Waiting = {
            "timeout_s": self.barrier_timeout_s,
            "abandon": lambda: self._over(generation) or self.run.stop_requested or program.ended,
            "report": lambda obstacle: heartbeat.update(obstacle=obstacle),
        }
        try:
            if self.alone and self._has_met(generation):
                # The others are long past it, their TensorFlow servers hold the ports. This task's own may still be
                # held by the program of its life before, while the kernel frees that one's memory.
                rendezvous.await_own_port(self._listener, **others_wait)
                return True
            token = f"{self.run.name}/{generation}"
            rendezvous.wait(self.spec, self._listener, token=token, explain=self._explain_missing, **others_wait)
        except rendezvous.Abandoned:
            if not self._over(generation):
                self._act_on_end_before_start(program, generation)
            return False
        except ClusterError as error:
            self.run.end("failed", task=self.task.name, exit_code=error.exit_code, error=str(error))
            return False
        self.run.event(self.task.name, "cluster complete", generation=generation)
        return True

    @property
    def _listener(self) -> Task:
        """Where this task listens at the rendezvous."""
        return self.task

    def _has_met(self, generation: int) -> bool:
        """Whether an earlier life of this task held the rendezvous of this generation."""
        mine = [e for e in self.run.events() if e["task"] == self.task.name and e["event"] == "cluster complete"]
        return generation in [e["generation"] for e in mine]

    def _act_on_end_before_start(self, program: Program, generation: int) -> None:
        """A stop that comes before the first step has nothing to save; a program that ended is the policy's."""
        if self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        else:
            self._act_on_exit(program, generation)

    def _over(self, generation: int) -> bool:
        """Whether this generation's program has no further purpose."""
        return self.run.outcome is not None or self.run.generation > generation

    def _watch(self, program: Program, generation: int) -> None:
        """Return once the program is no longer wanted or its end was acted on."""
        watchdog = self._watchdog = Watchdog(self.run, self.spec, self.task, generation)
        while True:
            if self._over(generation):
                return None
            if watchdog.hang_told:
                program.show_stacks()
            if finding := watchdog.examine():
                return self._act_on_finding(finding, watchdog, program, generation)
            if self.run.stop_requested and not self.serves:
                self._ask_to_end(program)
            if self.resumes or (program.can_wait and not self.standby.settled):
                self._notice_training(program)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(POLL_S)
                return self._act_on_exit(program, generation)

    @property
    def _state(self) -> str:
        """What this task's newest heartbeat says that it does."""
        beat = self.run.heartbeat(self.task.name)
        return str(beat["state"]) if beat else ""

    def _notice_training(self, program: Program) -> None:
        """Do what is due once the program trains."""
        state = self._state
        training = state == "training"
        if self.resumes and (training or (self.task.role == Role.EVALUATOR and state == "evaluating")):
            self.run.event(self.task.name, "resumed")
            self.resumes = False
        if program.can_wait:
            self.standby.keep(training=training)

    def _act_on_finding(self, finding: Finding, watchdog: Watchdog, program: Program, generation: int) -> None:
        """Apply the failure policy to a task that lives but does nothing."""
        stopped = finding.kind == "frozen" and processes.is_stopped(program.pid)
        kind = OUTSIDE if finding.kind == "silent" or stopped else OWN
        cause = f"{finding.cause}, stopped by a signal" if stopped else finding.cause
        self.run.event(finding.task, finding.kind, step=self.run.newest_step, cause=cause)
        end = self.recovery.end(generation, kind, cause, task=finding.task, at=time.time() - FROZEN_S)
        if finding.kind == "hang":
            watchdog.tell_hang(finding)
            program.show_stacks()
            self._wait_until_over(generation, STACKS_S)
        if self.alone and finding.task == self.task.name:
            program.end(0.0)
            self._restart_alone(end)
        elif self.run.stop_requested:
            self.run.end("stopped", task=finding.task)  # it cannot save any more; the newest checkpoint stays
        else:
            self.recovery.restart_gang(generation, end)

    def _ask_to_end(self, program: Program) -> None:
        """Ask the program to save and end, as often as this is called until it has."""
        program.ask_to_end()

    def _act_on_exit(self, program: Program, generation: int) -> None:
        """Apply the failure policy to an ended program."""
        code = program.wait()
        if self.run.outcome:
            return  # whatever ends after the run changes nothing
        end = self._end_of(program, code, generation)
        side_car = self.task.role == Role.EVALUATOR
        if self._has_finished(code) or (side_car and self.run.stop_requested):
            self._await_outcome(generation)  # its work was done, even if TensorFlow's teardown then lost the cluster
        elif EXIT_FAILED <= code <= EXIT_TIMEOUT and not side_car:
            self.run.end("failed", task=self.task.name, exit_code=code, error=end.reported)
        elif self.alone:
            self._restart_alone(end)  # also where the run is to stop: the chief saves with the help of its workers
        elif self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        else:
            self._restart_gang(generation, end)

    def _has_finished(self, code: int) -> bool:  # noqa: ARG002  # the code of a script is all that it says
        """Whether the program had said that it was done: any code of the user's can end it with exit code 0."""
        return self._state in ("done", "stopped")

    def _end_of(self, program: Program, code: int, generation: int) -> End:
        """Return what is to be known of the end of this task's program."""
        out_of_memory = self._ran_out_of_memory(code, program)
        member = self.task in self.spec.members
        lost_contact = code == EXIT_PEER_LOST and member and not self.run.script
        kind = LOST_CONTACT if lost_contact else ends.kind_of(code, out_of_memory=out_of_memory)
        cause = "lost contact with the cluster" if lost_contact else self._describe(code, out_of_memory=out_of_memory)
        # After a kill for memory the last lines are of something else; exit code 0 has none.
        error = None if out_of_memory or code == 0 else program.error(code)
        if code < 0 and error:
            error = f"{cause}: {error}"
        may_follow = lost_contact or (code == -signal.SIGABRT and member)  # TensorFlow aborts when another task dies
        return self.recovery.end(generation, kind, cause, error, may_follow=may_follow, lived_s=self._lived_s)

    @property
    def _lived_s(self) -> float:
        """How long a script ran; a program that records its steps needs no such measure."""
        return 0.0

    def _restart_gang(self, generation: int, end: End) -> None:
        """Start every task again, once the others have had the time to say that they failed first."""
        ends.record(self.run, generation, end)
        if end.kind == OUTSIDE or not self.spec.members:
            patience_s = 0.0
        else:
            patience_s = PEER_LOST_PATIENCE_S if end.may_follow else CULPRIT_PATIENCE_S
        if self._another_failed(generation, patience_s):
            return
        if self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        else:
            self.recovery.restart_gang(generation, end)

    def _another_failed(self, generation: int, patience_s: float) -> bool:
        """Wait a moment for another task that failed to begin the next generation, longer while one is silent.

        A task that was killed with its agent says so once it is back. One that stays silent is the one that failed.
        """
        deadline = time.monotonic() + patience_s
        while patience_s and not self._over(generation) and not self.run.stop_requested:
            if name := self._watchdog.silent_task(SILENT_S):
                cause = f"no sign of life for {SILENT_S:.0f} s"
                end = self.recovery.end(generation, OUTSIDE, cause, task=name, at=time.time() - SILENT_S)
                self.recovery.restart_gang(generation, end)
            if time.monotonic() > deadline and not self._watchdog.silent_task(SILENT_HINT_S):
                break
            time.sleep(POLL_S)
        return self._over(generation)

    def _await_outcome(self, generation: int) -> None:
        """Wait to hear how the run ended; the chief's agent says it."""
        if self.task.role == Role.CHIEF:
            stopped = self._state == "stopped"
            if stopped and self.run.stop_withdrawn(generation):
                self.run.begin_generation(generation + 1, resumed=True)
                return
            self.run.end("stopped" if stopped else "succeeded", task=self.task.name)
        else:
            self._wait_until_over(generation, float("inf"))

    def _wait_until_over(self, generation: int, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self._over(generation) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self._over(generation)

    def _describe(self, code: int, *, out_of_memory: bool) -> str:
        """Return what ended the program."""
        if out_of_memory and memory.limit_bytes() < sys.maxsize:
            return f"killed for memory: the task may use {memory.limit_bytes() / 2**30:.1f} GiB, see --memory of up"
        if out_of_memory:
            return "killed for memory: the machine had none left, says the kernel"
        return describe_exit(code) if code else "ended with exit code 0 before it was done"

    def _ran_out_of_memory(self, code: int, program: Program) -> bool:
        """Whether the kernel says that it killed the program for want of memory, and not the standby alone."""
        if code != -signal.SIGKILL:
            return False
        in_container = memory.kills() > self._kills_before + int(self.standby.killed)
        return in_container or memory.in_kernel_log(program.pid, self._began_s)

    def _restart_alone(self, end: End) -> None:
        """Start only this task's program again, unless that failed the run."""
        self._pause_s = self.recovery.restart_alone(end)
        self.resumes = True

    def _explain_missing(self, name: str) -> str:
        """What the run folder says about a task that does not answer."""
        beat = self.run.heartbeats().get(name)
        if beat is None:
            return "never started"
        told = f"state {beat['state']}"
        if beat.get("exit_code") is not None:
            told += f", {describe_exit(beat['exit_code'])}"
        if beat.get("obstacle"):
            told += f", {beat['obstacle']}"
        if last := last_line(self.run.log(name)):
            told += f", last line: {last[:200]}"
        return told

    def _finish(self) -> None:
        """Write the last heartbeat; the chief's agent also writes the summary, unless the run goes on elsewhere."""
        outcome = self.run.outcome
        assert outcome is not None
        beat = Heartbeat(self.run, self.spec.task(self.task.name), self.run.generation)
        last = self.run.heartbeat(self.task.name) or {}
        ended = {"succeeded": "done", "stopped": "stopped", "failed": "failed"}[outcome["state"]]
        if outcome["state"] == "failed" and outcome.get("task") != self.task.name:
            # This one is not the culprit: its work was done, or it was ended because another task failed.
            ended = "done" if last.get("state") == "done" else "stopped"
        beat.values |= last | {"state": ended, "exit_code": self.exit_code}
        beat.write()
        self.run.event(self.task.name, ended, step=last.get("step"), exit_code=self.exit_code)
        if self.task.role == Role.CHIEF and not self.run.goes_on:
            summary.write(self.run)
