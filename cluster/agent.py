"""The first process of every task: starts the task's program, watches it and the gang, applies the failure policy.

    python -m cluster.agent [-- COMMAND ...]     RUN_DIR, TASK and TF_CONFIG in the environment

The program is started at once, so that its imports run while the agents meet at the start barrier, and waits at its
gate (the pipe whose descriptor is `GATE_FD`) until the cluster is complete. What dies, and what happens then:

    chief, worker (synchronous), ps      a new generation: every agent ends its program and starts it again
    worker (parameter server), evaluator only that program starts again
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
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cluster import barrier, summary, tf_config
from cluster.errors import EXIT_FAILED, EXIT_PEER_LOST, EXIT_TIMEOUT, ClusterError, UsageError
from cluster.processes import as_exit_code, describe_exit, die_with_parent
from cluster.runs import Heartbeat, RunFolder, read_json
from cluster.spec import Role

BARRIER_TIMEOUT_S = 60.0
GRACE_S = 40.0
"""Seconds that a program gets to save and end by itself. The engine's own grace period is longer."""
POLL_S = 0.05
PEER_LOST_PATIENCE_S = 3.0
"""How long a task that lost contact waits for the task that really died to say so: the root cause is told, not this."""
SAME_STEP_LIMIT = 3


@dataclass
class Program:
    """One life of the task's program: its process, its gate, and the last lines that it printed."""

    process: subprocess.Popen[bytes]
    gate: int | None
    log: threading.Thread
    last_lines: list[str] = field(default_factory=list)
    asked_to_end: bool = False

    @classmethod
    def start(cls, command: list[str], environment: dict[str, str], log: Path) -> Program:
        """Start the command behind its gate, its output appended to `log` and passed on."""
        gate_read, gate_write = os.pipe()
        last_lines: list[str] = []
        process = subprocess.Popen(
            command,
            env=environment | {"GATE_FD": str(gate_read)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(gate_read,),
            process_group=0,  # a Ctrl-C in the terminal is for `invoke up` to handle
            preexec_fn=die_with_parent,
        )
        os.close(gate_read)
        assert process.stdout is not None
        pump = threading.Thread(target=_pump, args=(process.stdout, log, last_lines), daemon=True)
        pump.start()
        return cls(process, gate_write, pump, last_lines)

    def open_gate(self) -> None:
        """Let the program form its cluster."""
        if self.gate is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.gate, b"1")
            os.close(self.gate)
            self.gate = None

    def signal(self, number: int) -> None:
        """Send a signal to the program and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask_to_end(self) -> None:
        """Ask once: a second SIGTERM would cut short what the program does about the first."""
        if not self.asked_to_end:
            self.asked_to_end = True
            self.signal(signal.SIGTERM)

    def end(self, grace_s: float) -> int:
        """End the program, politely first; return its exit code."""
        if self.process.poll() is None and grace_s > 0:
            self.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        self.signal(signal.SIGKILL)
        code = self.process.wait()
        self.log.join(5.0)
        if self.gate is not None:
            os.close(self.gate)
            self.gate = None
        return code

    @property
    def last_line(self) -> str:
        """The last line that the program printed; of a traceback that is the error."""
        self.log.join(1.0)
        return self.last_lines[-1].removeprefix("error: ") if self.last_lines else ""


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
        self.restarts = 0
        self.exit_code: int | None = None

    def main(self) -> int:
        """Live generation after generation until the run has an outcome."""
        signal.signal(signal.SIGTERM, lambda *_: self.run.request_stop(self.task.name))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `invoke up` turns a Ctrl-C into a request to stop
        self._notice_own_death()
        while not self.run.outcome:
            self._live(self.run.generation)
        self._finish()
        return 0

    def _notice_own_death(self) -> None:
        """An agent that finds itself already in this generation was brought back by the engine: the task died."""
        beat = read_json(self.run.status(self.task.name), None)
        if not beat or beat["generation"] != self.run.generation:
            return
        self.restarts = beat["restarts"]
        finished = beat["state"] in ("done", "stopped")
        self.exit_code = beat.get("exit_code", 0 if finished else as_exit_code(-signal.SIGKILL))
        if self.run.outcome:
            return
        if finished:
            self._await_outcome(beat["generation"])
        elif self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif self.alone:
            self.restarts += 1
            self.run.event(self.task.name, "restarted", cause="the whole task was killed")
        else:
            self._begin_next(self.run.generation, "the whole task was killed", None, failed_at=beat["updated_at"])

    def _live(self, generation: int) -> None:
        """Run the program once in this generation, and act on its end."""
        environment = os.environ | {"GENERATION": str(generation), "RESTARTS": str(self.restarts)}
        heartbeat = Heartbeat(self.run, self.task, generation, self.restarts).start()
        program = Program.start(self.command, environment, self.run.log(self.task.name))
        try:
            if self._meet(program, heartbeat, generation):
                heartbeat.stop()
                program.open_gate()
                self._watch(program, generation)
        finally:
            heartbeat.stop()
            code = program.end(self._grace_s())
            self.exit_code = 0 if self.serves and self.run.outcome else as_exit_code(code)

    def _grace_s(self) -> float:
        """Seconds to save in: none where a task failed (the others hang in the step that it left) or nothing trains."""
        outcome = self.run.outcome
        if self.serves or not outcome or outcome["state"] == "failed":
            return 0.0
        return GRACE_S if self.run.heartbeats()[self.task.name]["state"] not in ("starting", "waiting") else 1.0

    def _meet(self, program: Program, heartbeat: Heartbeat, generation: int) -> bool:
        """Pass the start barrier; return whether the program may go on."""
        if self.task.role == Role.EVALUATOR or (self.alone and self._has_met(generation)):
            return True  # the others are long past the barrier, their TensorFlow servers hold the ports
        heartbeat.update(state="waiting")
        try:
            barrier.wait(
                self.spec,
                self.task,
                token=f"{self.run.name}/{generation}",
                timeout_s=self.barrier_timeout_s,
                abandon=lambda: self._over(generation) or self.run.stop_requested or program.process.poll() is not None,
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
        while True:
            if self._over(generation):
                return None
            if self.run.stop_requested and not self.serves:
                program.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.process.wait(POLL_S)
                return self._act_on_exit(program, generation)

    def _act_on_exit(self, program: Program, generation: int) -> None:
        """Apply the failure policy to an ended program."""
        code = program.process.wait()
        error = program.last_line
        if self.run.outcome:
            return  # whatever ends after the run changes nothing
        ended = read_json(self.run.status(self.task.name))["state"] in ("done", "stopped")
        side_car = self.task.role == Role.EVALUATOR
        if code == 0 or ended or (side_car and self.run.stop_requested):
            self._await_outcome(generation)  # its work was done, even if TensorFlow's teardown then lost the cluster
        elif EXIT_FAILED <= code <= EXIT_TIMEOUT and not side_car:
            self.run.end("failed", task=self.task.name, exit_code=code, error=error)
        elif self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif self.alone:
            self._restart_alone(code, error)
        elif code != EXIT_PEER_LOST:
            self._begin_next(generation, describe_exit(code), error)
        elif not self._wait_until_over(generation, PEER_LOST_PATIENCE_S):
            self._begin_next(generation, "lost contact with the cluster", error)

    def _await_outcome(self, generation: int) -> None:
        """Wait to hear how the run ended; the chief's agent says it."""
        if self.task.role == Role.CHIEF:
            stopped = read_json(self.run.status(self.task.name))["state"] == "stopped"
            self.run.end("stopped" if stopped else "succeeded", task=self.task.name)
        else:
            self._wait_until_over(generation, float("inf"))

    def _wait_until_over(self, generation: int, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self._over(generation) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self._over(generation)

    def _restart_alone(self, code: int, error: str) -> None:
        """Start only this task's program again, unless it keeps dying at the same step."""
        step = self._newest_step()
        restarts = [e for e in self.run.events() if e["task"] == self.task.name and e["event"] == "restarted"]
        if _same_step([e["step"] for e in restarts], step):
            told = f"step {step} failed {SAME_STEP_LIMIT} times: {error}"
            if self.task.role != Role.EVALUATOR:
                self.run.end("failed", task=self.task.name, exit_code=EXIT_FAILED, step=step, error=told)
                return
            # An evaluator that cannot work never fails the run.
            self.run.event(self.task.name, "gave up", step=step, error=told)
            self._wait_until_over(self.run.generation, float("inf"))
            return
        self.restarts += 1
        self.run.event(self.task.name, "restarted", step=step, cause=describe_exit(code), error=error)

    def _begin_next(self, generation: int, cause: str, error: str | None, failed_at: float | None = None) -> None:
        """Start the gang again in the next generation, unless it keeps failing at the same step."""
        why = {"task": self.task.name, "cause": cause, "error": error, "failed_at": failed_at or time.time()}
        step = self._newest_step()
        if _same_step([g["step"] for g in self.run.generations() if "task" in g], step):
            told = f"step {step} failed {SAME_STEP_LIMIT} times: {error or cause}"
            self.run.end("failed", task=self.task.name, exit_code=EXIT_FAILED, step=step, error=told)
        elif self.run.begin_generation(generation + 1, step=step, **why):
            self.run.event(self.task.name, "gang restart", step=step, cause=cause, error=error)

    def _newest_step(self) -> int:
        """The newest step that any task tells: servers count none of their own."""
        return max((beat["step"] for beat in self.run.heartbeats().values()), default=0)

    def _explain_missing(self, name: str) -> str:
        """What the run folder says about a task that does not answer."""
        beat = self.run.heartbeats().get(name)
        if beat is None:
            return "never started"
        told = f"state {beat['state']}"
        if beat.get("exit_code") is not None:
            told += f", {describe_exit(beat['exit_code'])}"
        with contextlib.suppress(OSError, IndexError):
            told += f", last line: {self.run.log(name).read_text().splitlines()[-1][:200]}"
        return told

    def _finish(self) -> None:
        """Write the last heartbeat; the chief's agent also writes the summary."""
        outcome = self.run.outcome
        assert outcome is not None
        beat = Heartbeat(self.run, self.spec.task(self.task.name), self.run.generation, self.restarts)
        last = read_json(self.run.status(self.task.name), {})
        ended = {"succeeded": "done", "stopped": "stopped", "failed": "failed"}[outcome["state"]]
        if outcome["state"] == "failed" and outcome.get("task") != self.task.name:
            ended = "stopped"  # ended because another task failed: this one is not the culprit
        beat.values |= last | {"state": ended, "exit_code": self.exit_code}
        beat.write()
        self.run.event(self.task.name, ended, step=last.get("step"), exit_code=self.exit_code)
        if self.task.role == Role.CHIEF:
            summary.write(self.run)


def _same_step(before: list[int], step: int) -> bool:
    """Whether the newest failures and this one are as many as are tolerated, all at one step."""
    return before[-(SAME_STEP_LIMIT - 1) :] == [step] * (SAME_STEP_LIMIT - 1)


def _pump(stream: IO[bytes], log: Path, last_lines: list[str]) -> None:
    """Copy the program's output to its log and to the agent's own output, and remember its end."""
    with log.open("ab") as file:
        for line in stream:
            with contextlib.suppress(OSError):  # a full disk must not block the program that prints
                file.write(line)
                file.flush()
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            if text := line.decode(errors="replace").strip():
                last_lines[:] = [*last_lines[-19:], text]


def main(arguments: list[str]) -> int:
    """Run the task that the environment names."""
    try:
        missing = [name for name in ("RUN_DIR", "TASK") if name not in os.environ]
        if missing:
            raise UsageError(f"{' and '.join(missing)} not set: an agent is started by `invoke up`, which sets them")
        run_dir, task = os.environ["RUN_DIR"], os.environ["TASK"]
        command = arguments[1:] if arguments[:1] == ["--"] else [sys.executable, "-m", "train", "--run-dir", run_dir]
        if text := os.environ.get("TF_CONFIG"):
            tf_config.parse(text)
        timeout_s = float(os.environ.get("BARRIER_TIMEOUT_S", str(BARRIER_TIMEOUT_S)))
        return Agent(RunFolder(Path(run_dir)), task, command, timeout_s).main()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
