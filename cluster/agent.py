"""The first process of every task: starts the task's program, watches it and the gang, applies the failure policy.

    python -m cluster.agent [-- COMMAND ...]               RUN_DIR, TASK and TF_CONFIG in the environment
    python -m cluster.agent --script FILE [ARGUMENT ...]   the same for a script, see cluster/script_agent.py

The program is started at once, so that its imports run while the agents meet at the start barrier, and waits at its
gate (the pipe whose descriptor is `GATE_FD`) until the cluster is complete. What dies, and what happens then:

    chief, worker (synchronous), ps      a new generation: every agent ends its program and starts it again
    worker (parameter server), evaluator only that program starts again
    frozen, or no new step               as if it had died; see cluster/watchdog.py
    exit code 1 to 4                     the program knows that trying again is useless: the run fails (never the
                                         evaluator's doing: it starts again, and gives up at the third time)
    the same step failing 3 times        the run fails

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
from pathlib import Path

from cluster import barrier, cgroup, restarts, settings, summary, tf_config
from cluster.errors import EXIT_FAILED, EXIT_PEER_LOST, EXIT_TIMEOUT, ClusterError, UsageError
from cluster.files import write_json
from cluster.heartbeat import Heartbeat
from cluster.logs import last_line
from cluster.processes import as_exit_code, describe_exit, identity
from cluster.program import Program, Trainer
from cluster.restarts import SAME_STEP_LIMIT
from cluster.runs import RunFolder
from cluster.spare import Spare
from cluster.spec import Role, Task
from cluster.watchdog import FROZEN_S, Finding, Watchdog

GRACE_S = 40.0
"""Seconds that a program gets to save and end by itself. The engine's own grace period is longer."""
POLL_S = 0.1
PEER_LOST_PATIENCE_S = 3.0
"""How long a task that lost contact waits for the task that really died to say so: the root cause is told, not this."""
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
        self.spare = Spare(self._program, self.spec.tasks.index(self.task), len(self.spec.tasks))
        self._kills_before = cgroup.kills()

    def main(self) -> int:
        """Live generation after generation until the run has an outcome."""
        signal.signal(signal.SIGTERM, lambda *_: self.run.request_stop(self.task.name))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `invoke up` turns a Ctrl-C into a request to stop
        self._notice_own_death()
        while not self.run.outcome:
            self._live(self.run.generation)
        self.spare.end()
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
        if finished:
            self._await_outcome(beat["generation"])
        elif self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif self.alone:
            self._restarted(self.run.newest_step, "the whole task was killed", None, beat["updated_at"])
        else:
            self._begin_next(self.run.generation, "the whole task was killed", None, failed_at=beat["updated_at"])

    def _live(self, generation: int) -> None:
        """Run the program once in this generation, and act on its end."""
        again = restarts.count(self.run, self.task.name)
        heartbeat = Heartbeat(self.run, self.task, generation, again).start()
        life = {"GENERATION": str(generation), "RESTARTS": str(again)}
        self.run.programs(self.task.name).unlink(missing_ok=True)  # those of the life before
        program = self.spare.take() or self._program(os.environ | life)
        self._kills_before = cgroup.kills()
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

    def _program(self, environment: dict[str, str]) -> Program:
        """Return this generation's program, which forms no cluster before `_begin`."""
        return Trainer(self.command, environment, self.run.log(self.task.name))

    def _begin(self, program: Program, heartbeat: Heartbeat, life: dict[str, str]) -> None:
        """Let the program form its cluster. It writes the heartbeat itself once its imports, however slow, are done."""
        heartbeat.hand_over()
        if self.task in self.spec.members:
            generation = int(life["GENERATION"])
            barrier.await_servers(
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
        return GRACE_S if self._state not in ("starting", "waiting") else 1.0

    def _meet(self, program: Program, heartbeat: Heartbeat, generation: int) -> bool:
        """Pass the start barrier; return whether the program may go on."""
        if self.task.role == Role.EVALUATOR or (self.alone and self._has_met(generation)):
            return True  # the others are long past the barrier, their TensorFlow servers hold the ports
        heartbeat.update(state="waiting")
        try:
            barrier.wait(
                self.spec,
                self._listener,
                token=f"{self.run.name}/{generation}",
                timeout_s=self.barrier_timeout_s,
                abandon=lambda: self._over(generation) or self.run.stop_requested or program.ended,
                explain=self._explain_missing,
            )
        except barrier.Abandoned:
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
        """Where this task listens at the start barrier."""
        return self.task

    def _has_met(self, generation: int) -> bool:
        """Whether an earlier life of this task passed the barrier of this generation."""
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
        watchdog = Watchdog(self.run, self.spec, self.task, generation)
        while True:
            if self._over(generation):
                return None
            if watchdog.hang_told:
                program.show_stacks()
            if finding := watchdog.examine():
                return self._act_on_finding(finding, watchdog, program, generation)
            if self.run.stop_requested and not self.serves:
                self._ask_to_end(program)
            if self.resumes or (program.can_wait and not self.spare.settled):
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
            self.spare.keep(training=training)

    def _act_on_finding(self, finding: Finding, watchdog: Watchdog, program: Program, generation: int) -> None:
        """Apply the failure policy to a task that lives but does nothing."""
        self.run.event(finding.task, finding.kind, step=self.run.newest_step, cause=finding.cause)
        since = time.time() - FROZEN_S
        if finding.kind == "hang":
            watchdog.tell_hang(finding)
            program.show_stacks()
            self._wait_until_over(generation, STACKS_S)
        if self.run.stop_requested:
            self.run.end("stopped", task=finding.task)  # it cannot save any more; the newest checkpoint stays
        elif finding.kind == "frozen" and self.alone:
            program.end(0.0)
            self._restart_alone(describe_exit(-signal.SIGKILL), finding.cause)
        else:
            self._begin_next(generation, finding.cause, None, failed_at=since, task=finding.task)

    def _ask_to_end(self, program: Program) -> None:
        """Ask the program to save and end, as often as this is called until it has."""
        program.ask_to_end()

    def _act_on_exit(self, program: Program, generation: int) -> None:
        """Apply the failure policy to an ended program."""
        code = program.wait()
        cause = self._describe(code)
        error = cause if self._ran_out_of_memory(code) else program.last_line  # which then was of something else
        if self.run.outcome:
            return  # whatever ends after the run changes nothing
        ended = self._state in ("done", "stopped")
        side_car = self.task.role == Role.EVALUATOR
        if code == 0 or ended or (side_car and self.run.stop_requested):
            self._await_outcome(generation)  # its work was done, even if TensorFlow's teardown then lost the cluster
        elif EXIT_FAILED <= code <= EXIT_TIMEOUT and not side_car:
            self.run.end("failed", task=self.task.name, exit_code=code, error=error)
        elif self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif self.alone:
            self._restart_alone(cause, error)
        elif code != EXIT_PEER_LOST:
            self._begin_next(generation, cause, error)
        elif not self._wait_until_over(generation, PEER_LOST_PATIENCE_S):
            self._begin_next(generation, "lost contact with the cluster", error)

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

    def _describe(self, code: int) -> str:
        """Return why the program ended."""
        if not self._ran_out_of_memory(code):
            return describe_exit(code)
        return f"killed for memory: the task may use {cgroup.limit_bytes() / 2**30:.1f} GiB, see --memory of up"

    def _ran_out_of_memory(self, code: int) -> bool:
        """Whether the kernel killed the program because its container had no memory left, and not the spare alone."""
        return code == -signal.SIGKILL and cgroup.kills() > self._kills_before + int(self.spare.killed)

    def _restart_alone(self, cause: str, error: str) -> None:
        """Start only this task's program again, unless it keeps dying at the same step."""
        step = self.run.newest_step
        if restarts.same_step([e["step"] for e in restarts.alone(self.run, self.task.name)], step):
            told = self._told_of_last(step, cause, error)
            if self.task.role != Role.EVALUATOR:
                self.run.end("failed", task=self.task.name, exit_code=EXIT_FAILED, step=step, error=told)
                return
            # An evaluator that cannot work never fails the run.
            self.run.event(self.task.name, "gave up", step=step, error=told)
            self._wait_until_over(self.run.generation, float("inf"))
            return
        self._restarted(step, cause, error, time.time())

    def _restarted(self, step: int, cause: str, error: str | None, failed_at: float) -> None:
        self.run.event(self.task.name, "restarted", step=step, cause=cause, error=error, failed_at=failed_at)
        self.resumes = True

    def _begin_next(
        self, generation: int, cause: str, error: str | None, failed_at: float | None = None, task: str = ""
    ) -> None:
        """Start the gang again in the next generation, unless it keeps failing at the same step."""
        step, failed_at, task = self.run.newest_step, failed_at or time.time(), task or self.task.name
        why = {"task": task, "cause": cause, "error": error, "failed_at": failed_at}
        if restarts.gang_keeps_failing(self.run, step, failed_at):
            told = self._told_of_last(step, cause, error)
            self.run.end("failed", task=task, exit_code=EXIT_FAILED, step=step, error=told)
        elif self.run.begin_generation(generation + 1, step=step, **why):
            self.run.event(task, "gang restart", step=step, cause=cause, error=error)

    def _told_of_last(self, step: int, cause: str, error: str | None) -> str:
        """Return what is told of the failure that was one too many."""
        return f"step {step} failed {SAME_STEP_LIMIT} times: {error or cause}"

    def _explain_missing(self, name: str) -> str:
        """What the run folder says about a task that does not answer."""
        beat = self.run.heartbeats().get(name)
        if beat is None:
            return "never started"
        told = f"state {beat['state']}"
        if beat.get("exit_code") is not None:
            told += f", {describe_exit(beat['exit_code'])}"
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


def main(arguments: list[str]) -> int:
    """Run the task that the environment names."""
    try:
        missing = [name for name in ("RUN_DIR", "TASK") if name not in os.environ]
        if missing:
            raise UsageError(f"{' and '.join(missing)} not set: an agent is started by `invoke up`, which sets them")
        run_dir, task = os.environ["RUN_DIR"], os.environ["TASK"]
        if text := os.environ.get("TF_CONFIG"):
            tf_config.parse(text)
        timeout_s = settings.seconds("BARRIER_TIMEOUT_S")
        run = RunFolder(Path(run_dir))
        if arguments[:1] == ["--script"]:
            from cluster.script_agent import ScriptAgent  # it is built on this module

            return ScriptAgent(run, task, [sys.executable, *arguments[1:]], timeout_s).main()
        command = arguments[1:] if arguments[:1] == ["--"] else [sys.executable, "-m", "train", "--run-dir", run_dir]
        return Agent(run, task, command, timeout_s).main()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
