"""The agent of a task: starts the task's program, watches it and the other tasks, and applies the failure policy.

The agent imports once what its training programs need and forks them; one that cannot be forked it starts at once, so
that its imports run during the rendezvous of the agents. The program waits at its gate, the pipe whose descriptor is
`GATE_FD`, until the cluster is complete. What fails, and what happens then:

    chief, worker (synchronous), ps      a new generation: every agent ends its program and starts it again
    worker (parameter server), evaluator only that program starts again
    frozen, or no new step               as if it had died; see cluster/agent/watchdog.py
    exit code 1 to 4                     the program knows that another attempt is useless: the run fails, unless the
                                         program is the evaluator, which starts again after growing pauses
    failing by itself without progress   after `--max-restarts` times the run fails;
                                         see cluster/contract/recovery/attempts.py

Agents share the run folder and send each other its new records (cluster/agent/gang), so this works under any engine
that restarts a task whose agent dies.
The agent exits with 0 once the outcome is recorded: with any other code the engine would start it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from functools import partial

from cluster.agent import ports, rendezvous, tmpdir
from cluster.agent.decisions import POLL_S, Decisions
from cluster.agent.diagnosis import MemoryKills, explain_missing
from cluster.agent.gang.board import Board
from cluster.agent.program import Program, Trainer
from cluster.agent.standby import Standby
from cluster.agent.watchdog import FROZEN_S, Finding, Watchdog
from cluster.contract import settings, tf_config
from cluster.contract.recovery import attempts, ends, standby_cluster
from cluster.contract.recovery.attempts import EXTERNAL, PLANNED, PROGRAM_FAILURE
from cluster.contract.run import joining
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import OutcomeState, TaskState
from cluster.contract.spec import Role, Task
from cluster.system import fork_server, quiet
from cluster.system.errors import EXIT_FAILED, EXIT_PEER_LOST, EXIT_TIMEOUT, ClusterError
from cluster.system.json_files import write_json
from cluster.system.processes import as_exit_code, identity

GRACE_S = 40.0
"""Seconds that a program gets to save and end by itself. The engine's own grace period is longer."""
NOTHING_TO_SAVE = ("starting", "waiting", "restarting")
SERVERS_S = 120.0
"""Longest wait for the TensorFlow servers that this task calls first: they listen once their imports are done."""
LOOK_S = 0.5
"""How often an agent looks whether the cluster of the standby processes has lost one."""
STACKS_S = 1.0
"""How long the programs of a hanging gang get to print their stacks."""


class Agent(Decisions):
    """Runs one task from its start to the run's outcome."""

    def __init__(
        self, run: Board, task_name: str, command: list[str], rendezvous_timeout_s: float, *, imports: str = ""
    ) -> None:
        """Prepare the agent.

        Args:
            run: the run.
            task_name: the name of its task.
            command: the program.
            rendezvous_timeout_s: how long to wait for the other tasks.
            imports: a module whose `load` imports the program's modules, see cluster/system/fork_server.py.
        """
        super().__init__(run, task_name)
        self.command = command
        self._imports = imports
        self.rendezvous_timeout_s = rendezvous_timeout_s
        self.standby = Standby(self._program, self.spec.tasks.index(self.task), len(self.spec.tasks))
        self._standby_checked = 0.0
        self._last_generation = -1
        """The generation of the previous attempt."""
        self._formed = False
        """Whether the program has formed its cluster already, as a standby process."""
        self._stopped: Finding | None = None
        """A program that a signal had stopped before it was let through its gate."""

    def main(self) -> int:
        """Make one attempt after the other until the run has an outcome."""
        then = os.environ.get("STOP_THEN", "")
        signal.signal(signal.SIGTERM, lambda *_: self._act_on_terminate(then))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `invoke up` turns a Ctrl-C into a stop request
        standby_cluster.withdraw(self.run, self.task.name)  # an agent that died had a standby process
        self.run.join(self.spec, self.task, self._listener.host)
        self._report_own_death()
        self._import()
        while not self.run.outcome:
            self.run.require_newest()
            generation = self.run.generation
            if self.members.has(generation):
                self._attempt(generation)
            else:
                self.members.await_turn(generation, partial(self._is_over, generation), self._listener)
        self.standby.end()
        self.run.require_newest()
        self.run.leave()
        tmpdir.remove(self.run, self.task)
        self._finish()
        return 0

    def _act_on_terminate(self, then: str) -> None:
        """Request that the run stops, unless it continues without this task, or with another container in its place."""
        if not self.members.has(self.run.generation) or self.run.replaced.exists():
            raise SystemExit(EXIT_PEER_LOST)
        self.run.request_stop(self.task.name, then=then)

    def _report_own_death(self) -> None:
        """Report that the whole task died, if a heartbeat of this generation says that the engine restarted it."""
        beat = self.run.heartbeat(self.task.name)
        if not beat:
            return
        self.run.begun(beat.generation)  # a network file system may not list it yet
        if beat.generation != self.run.generation or beat.importing:
            return
        if not self.members.has(beat.generation):
            return
        finished = beat.state in (TaskState.DONE, TaskState.STOPPED)
        self.exit_code = beat.exit_code
        if self.exit_code is None:
            self.exit_code = 0 if finished else as_exit_code(-signal.SIGKILL)
        if self.run.outcome:
            return
        self._last_generation = generation = beat.generation
        if finished:
            self._await_outcome(generation)
        elif self.run.stop_requested and not self.restarts_alone:
            self.run.end("stopped", task=self.task.name)
        else:
            kind, cause = EXTERNAL, "the whole task was killed"
            if self.run.replaced.exists():
                kind, cause = PLANNED, "its code was changed"
            end = self.recovery.end(generation, kind, cause, at=beat.updated_at)
            if self.restarts_alone:
                self._restart_alone(end)
            else:
                ends.record(self.run, generation, end)
                self.recovery.restart_gang(generation, end)

    def _import(self) -> None:
        """Import once the modules of every attempt's program. Only Python programs on a CPU can be forked after that.

        If that fails or kills this process, each program imports them and reports its own failure.
        """
        accelerated = "GPUS_GIVEN" in os.environ or self.spec.kind.hardware
        if not self._imports or accelerated or not settings.is_on("SHARED_IMPORT") or fork_server.has_preloaded():
            return
        beat = self.run.heartbeat(self.task.name)
        if self.run.outcome or (beat and beat.generation == self.run.generation and beat.importing):
            return  # the run has ended, or the import has killed this agent before
        restarts = attempts.restarts(self.run, self.task.name)
        heartbeat = HeartbeatWriter(self.run, self.task, self.run.generation, restarts)
        heartbeat.update(importing=True)
        heartbeat.start()
        with contextlib.suppress(Exception), quiet.imports():
            fork_server.preload(self._imports, self.run)
        heartbeat.stop()

    def _attempt(self, generation: int) -> None:
        """Run the program once in this generation, and act on its end."""
        self._join(generation)
        restarts = attempts.restarts(self.run, self.task.name)
        heartbeat = HeartbeatWriter(self.run, self.task, generation, restarts).start()
        if not self._pause(heartbeat, generation):
            heartbeat.stop()
            return
        variables = {"GENERATION": str(generation), "RESTARTS": str(restarts), **self.members.variables(self.spec)}
        self.run.programs(self.task.name).unlink(missing_ok=True)  # of the previous attempt
        standby_cluster.withdraw(self.run, self.task.name)
        self._formed = standby_cluster.begins(self.run, self.task, generation)
        program = self.standby.take(in_cluster=self._formed)
        if self._formed and program is None:
            heartbeat.stop()
            end = self.recovery.end(generation, EXTERNAL, "its standby process had ended")
            self.recovery.restart_gang(generation, end)
            return
        program = program or self._program(os.environ | variables)
        self._memory_kills = MemoryKills()
        self._watchdog = Watchdog(self.run, self.spec, self.task, generation)
        try:
            self._record_processes(program)
            if self._rendezvous(program, heartbeat, generation):
                self.run.require_newest()  # the others may have met another copy of this task
                self._let_start(program, heartbeat, variables)
                if not program.can_wait:
                    self._record_processes(program)  # it has begun only now
                self._watch(program, generation)
        finally:
            heartbeat.stop()
            code = as_exit_code(program.end(self._grace_s()))
            outcome = self.run.outcome
            at_fault = outcome and (outcome.state, outcome.task) == (OutcomeState.FAILED, self.task.name)
            self.exit_code = 0 if self.serves and outcome and not at_fault else code

    def _record_processes(self, program: Program) -> None:
        """Record the processes of this task for the injection of faults."""
        if program.pid:
            with contextlib.suppress(OSError):  # a full disk
                pids = {"agent": os.getpid(), "program": program.pid}
                write_json(self.run.programs(self.task.name), {of: identity(pid) for of, pid in pids.items()})

    def _pause(self, heartbeat: HeartbeatWriter, generation: int) -> bool:
        """Wait before a program that failed by itself starts again; return whether to start it."""
        if generation != self._last_generation:
            begun = self.run.begun(generation)
            self._pause_s = begun.pause_s if begun else 0.0
        seconds, self._pause_s, self._last_generation = self._pause_s, 0.0, generation
        if not seconds:
            return True
        heartbeat.update(state="restarting")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._is_over(generation) and not self.run.stop_requested:
            time.sleep(POLL_S)
        if self.run.stop_requested and self.task.role.is_sidecar:
            self._wait_until_over(generation)  # it has nothing to save
        elif self.run.stop_requested and not self.restarts_alone:
            self.run.end("stopped", task=self.task.name)
        return not self._is_over(generation)  # a worker starts again even so: the chief saves with its help

    def _program(self, environment: dict[str, str]) -> Program:
        """Create the program. It does not join the cluster before `_let_start`."""
        return Trainer(self.command, tmpdir.add(environment, self.run, self.task), self.run.log(self.task.name))

    def _rendezvous(self, program: Program, heartbeat: HeartbeatWriter, generation: int) -> bool:
        """Hold the rendezvous with the other tasks; return whether the program may start."""
        if self.task.role == Role.EVALUATOR:
            return True
        heartbeat.update(state="waiting")
        if self._formed:
            self.run.event(self.task.name, "cluster complete", generation=generation)
            return True
        waiting: ports.Waiting = {
            "timeout_s": self.rendezvous_timeout_s,
            "abandon": lambda: self._is_over(generation) or self.run.stop_requested or self._has_failed(program),
            "report": lambda obstacle: heartbeat.update(obstacle=obstacle),
        }
        try:
            # A data service is not a member of the cluster, but it listens as well.
            if self.task.role.is_data_service or (
                self.restarts_alone and self.task.name in self._passed_rendezvous(generation)
            ):
                # The other tasks passed it long ago and their TensorFlow servers hold their ports. This task's port may
                # still be in use while the kernel frees the memory of its previous program.
                ports.listen(self._listener, **waiting).close()
                return True
            come, absent = partial(self.run.come, generation), partial(self.run.absent, generation)
            rendezvous.wait(
                self.spec,
                self._listener,
                rendezvous.Hub(lambda: self.run.gathers, come, absent),
                token=joining.generation_token(self.run, generation),
                # A task that restarts alone may have been killed after the others had met it, and one that lost its
                # connection to the hub may not know that all have come: the others do not wait for it again.
                passed=partial(self._passed_rendezvous, generation),
                explain=partial(explain_missing, self.run),
                patience=partial(self.members.patience_s, self.rendezvous_timeout_s),
                **waiting,
            )
        except ports.Abandoned:
            if not self._is_over(generation):
                self._act_on_early_end(program, generation)
            return False
        except ClusterError as error:
            self._act_on_missing(error, generation)
            return False
        self.run.event(self.task.name, "cluster complete", generation=generation)
        return True

    @property
    def _listener(self) -> Task:
        """The address at which this task listens during the rendezvous.

        All addresses of a container that is on two networks: its name may resolve to either address.
        """
        if self._on_two_networks and self.task.host != "127.0.0.1":
            return dataclasses.replace(self.task, host="0.0.0.0")  # noqa: S104
        return self.task

    def _act_on_early_end(self, program: Program, generation: int) -> None:
        """Act on a stop request or the program's end before it started to train, when there is nothing to save."""
        if self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        elif self._stopped:
            self._act_on_finding(self._stopped, program, generation)
        else:
            self._act_on_exit(program, generation)

    def _has_failed(self, program: Program) -> bool:
        """Whether the program has ended, or a signal keeps it stopped."""
        self._stopped = None if program.ended else self._watchdog.stopped(program.stopped_s)
        return program.ended or self._stopped is not None

    def _let_start(self, program: Program, heartbeat: HeartbeatWriter, variables: dict[str, str]) -> None:
        """Let the program join the cluster. Once its imports are done, the program writes the heartbeat itself."""
        heartbeat.hand_over()
        if self._formed:
            variables = {name: value for name, value in variables.items() if name != "TF_CONFIG"}  # it has another one
        elif self.task in self.spec.members:
            generation = int(variables["GENERATION"])
            watchdog = Watchdog(self.run, self.spec, self.task, generation)
            findings: list[Finding] = []

            def abandon() -> bool:
                findings.extend(filter(None, [watchdog.examine(program.stopped_s)]))
                return bool(findings) or self._is_over(generation) or self.run.stop_requested or program.ended

            ports.await_servers(self.spec.calls_first(self.task), timeout_s=SERVERS_S, abandon=abandon)
            if findings:
                self._act_on_finding(findings[0], program, generation)
                return
        program.open_gate(variables)

    def _grace_s(self) -> float:
        """Seconds to save in; none after a failure, since the others hang in a step, or if nothing was trained."""
        outcome = self.run.outcome
        if self.serves or not outcome or outcome.state == OutcomeState.FAILED:
            return 0.0
        return 1.0 if self._state in NOTHING_TO_SAVE else GRACE_S

    def _watch(self, program: Program, generation: int) -> None:
        """Return once the generation is over, or the program's end or a finding was acted on."""
        watchdog = self._watchdog = Watchdog(self.run, self.spec, self.task, generation)
        while not self._is_over(generation):
            if watchdog.hang_reported:
                program.show_stacks()
            if finding := watchdog.examine(program.stopped_s):
                return self._act_on_finding(finding, program, generation)
            if self.task.role.is_sidecar and (late := watchdog.late(self.rendezvous_timeout_s)):
                return self._act_on_late(late, generation)
            self.members.take_in_returned(self.recovery, generation)
            if self.run.stop_requested and not self.serves and self.task.role != Role.EVALUATOR:
                self._request_end(program)  # an evaluator ends after the run, whose last checkpoint it evaluates
            self._check_standby(generation)
            if self._resuming or (program.can_wait and not self.standby.settled):
                self._act_on_training(program, generation)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(POLL_S)
                return self._act_on_exit(program, generation)
        return None

    def _act_on_training(self, program: Program, generation: int) -> None:
        """Report that the program trains again, and keep its standby process."""
        state = self._state
        if self._resuming and (state == "training" or (self.task.role == Role.EVALUATOR and state == "evaluating")):
            self.run.event(self.task.name, "resumed")
            self._resuming = False
        if program.can_wait:
            variables = self._standby_variables(generation)
            self.standby.keep(training=state == "training", variables=variables, like=program.pid)

    def _check_standby(self, generation: int) -> None:
        """Give up a standby process that has ended, and one of a cluster of which another has ended."""
        number = self.standby.cluster
        if self.standby.ended:
            standby_cluster.withdraw(self.run, self.task.name)
            if number is not None:
                standby_cluster.replace_cluster(self.run, generation, number)
        elif number is not None and time.monotonic() - self._standby_checked >= LOOK_S:
            self._standby_checked = time.monotonic()
            if standby_cluster.number(self.run, generation, number) > number:
                self.standby.remove()
                standby_cluster.withdraw(self.run, self.task.name)

    def _standby_variables(self, generation: int) -> dict[str, str] | None:
        """Return the variables of a standby process that forms a cluster with the others; None where it cannot."""
        possible = standby_cluster.trains(self.task) and standby_cluster.possible(self.run, self.spec)
        if not possible or "GPUS_GIVEN" in os.environ:
            return None
        cluster = standby_cluster.of(self.run, self.spec, generation)
        config = tf_config.dumps(cluster, cluster.task(self.task.name))
        number = standby_cluster.number(self.run, generation)
        return {
            "GENERATION": str(generation),
            standby_cluster.VARIABLE: config or "",
            standby_cluster.NUMBER: str(number),
        }

    def _act_on_finding(self, finding: Finding, program: Program, generation: int) -> None:
        """Apply the failure policy to a task that is alive but does nothing."""
        if finding.kind == "silent":
            self._act_on_silence(finding, generation)
            return
        stopped = finding.stopped or (finding.kind == "frozen" and program.is_stopped)
        kind = EXTERNAL if stopped else PROGRAM_FAILURE
        cause = f"{finding.cause}, stopped by a signal" if stopped else finding.cause
        self.run.event(finding.task, finding.kind, step=self.run.newest_step, cause=cause)
        end = self.recovery.end(generation, kind, cause, task=finding.task, at=time.time() - FROZEN_S)
        if finding.kind == "hang":
            self._watchdog.report_hang(finding)
            program.show_stacks()
            self._wait_until_over(generation, STACKS_S)
        if self.restarts_alone and finding.task == self.task.name:
            program.end(0.0)
            self._restart_alone(end)
        else:
            self._restart_for(end, generation)

    def _request_end(self, program: Program) -> None:
        """Ask the program to save and end; called repeatedly until it has."""
        program.request_end()

    def _act_on_exit(self, program: Program, generation: int) -> None:
        """Apply the failure policy to a program that ended."""
        code = program.wait()
        if self._is_over(generation):
            return  # an end after that of the run or its generation has no effect
        end = self._end_of(program, code, generation)
        is_sidecar = self.task.role.is_sidecar
        if self._state in ("done", "stopped") or (is_sidecar and self.run.stop_requested):
            # The program reports whether it was done: any user code can end it with exit code 0, and TensorFlow's
            # teardown can fail after the work was done.
            self._await_outcome(generation)
        elif EXIT_FAILED <= code <= EXIT_TIMEOUT and self.task.role != Role.EVALUATOR:
            self.run.end("failed", task=self.task.name, exit_code=code, error=end.reported)
        elif self.restarts_alone:
            self._restart_alone(end)  # also if the run is to stop: the chief saves with the help of its workers
        elif self.run.stop_requested:
            self.run.end("stopped", task=self.task.name)
        else:
            self._restart_gang(generation, end)
