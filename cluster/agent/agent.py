"""The agent of a task: starts the task's program, watches it and the other tasks, and applies the failure policy.

The agent imports once what its training programs need and forks them; one that cannot be forked it starts at once, so
that its imports run during the rendezvous of the agents. The program waits at its gate, the pipe whose descriptor is
`GATE_FD`, until the cluster is complete. From then on the agent observes, decides (`decide.py`, which has the failure
policy) and acts, until the generation is over or its program is to start again.

Agents share the run folder and send each other its new records (cluster/agent/board.py), so this works under any engine
that restarts a task whose agent dies.
The agent exits with 0 once the outcome is recorded: with any other code the engine would start it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial

from cluster.agent import decide, rendezvous, task_ports
from cluster.agent.attempt import POLL_S, SCRIPT_GRACE_S, Attempt
from cluster.agent.board import Board
from cluster.agent.decide import Action, EndRun, Facts, Phase, RestartAlone, RestartGang, Step
from cluster.agent.elastic import Members
from cluster.agent.restarting import Restarter
from cluster.agent.standby import Standby
from cluster.agent.task_process import TaskProcess, Trainer, create, remove_temporary_folder
from cluster.agent.watchdog import Stall
from cluster.contract import settings, tf_config
from cluster.contract.recovery import attempt_limits, ends, standby_cluster
from cluster.contract.recovery.attempt_limits import EXTERNAL
from cluster.contract.recovery.ends import End
from cluster.contract.results import summary
from cluster.contract.run import joining, membership
from cluster.contract.run.folder import TASK_LOST
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import AfterStop, OutcomeState, TaskState
from cluster.contract.spec import Role, Task
from cluster.system import fork_server, quiet
from cluster.system.errors import EXIT_PEER_LOST, ClusterError
from cluster.system.json_files import write_json
from cluster.system.processes import as_exit_code, identity

GRACE_S = 40.0
"""Seconds that a program gets to save and end by itself. The engine's own grace period is longer."""
NOTHING_TO_SAVE = (TaskState.STARTING, TaskState.WAITING, TaskState.RESTARTING)
SERVERS_S = 120.0
"""Longest wait for the TensorFlow servers that this task calls first: they listen once their imports are done."""
LOOK_S = 0.5
"""How often an agent looks whether the cluster of the standby processes has lost one."""
STACKS_S = 1.0
"""How long the programs of a hanging gang get to print their stacks."""


class Agent:
    """Runs one task from its start to the run's outcome."""

    def __init__(
        self,
        run: Board,
        task_name: str,
        command: list[str],
        rendezvous_timeout_s: float,
        *,
        kind: type[TaskProcess] = Trainer,
        imports: str = "",
    ) -> None:
        """Prepare the agent.

        `imports` is a module whose `load` imports the program's modules, see cluster/system/fork_server.py.
        """
        self.run = run
        self.spec = membership.cluster_with_addresses(run.folder)
        self.task = self.spec.task(task_name)
        self.exit_code: int | None = None
        self.members = Members(run, self.spec, self.task)
        self.rendezvous_timeout_s = rendezvous_timeout_s
        self._kind, self._command, self._imports = kind, command, imports
        self.standby = Standby(self._program, self.spec.tasks.index(self.task), len(self.spec.tasks))
        self._standby_checked = 0.0
        self._last_generation = -1
        """The generation of the previous attempt."""
        self._resuming = False
        """Whether the event `resumed` is due once the program trains, after a restart of this task alone."""
        self._pause_s = 0.0
        """How long to wait before the next attempt, if only this task starts again."""

    def main(self) -> int:
        """Make one attempt after the other until the run has an outcome."""
        then = os.environ.get("STOP_THEN", "")
        signal.signal(signal.SIGTERM, lambda *_: self._act_on_terminate(then))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `invoke up` turns a Ctrl-C into a stop request
        standby_cluster.withdraw(self.run.folder, self.task.name)  # an agent that died had a standby process
        self.run.connect(self.spec, self.task, self._listener.host)
        self._report_own_death()
        self._import()
        while not self.run.outcome:
            self.run.require_newest()
            generation = self.run.generation
            if self.members.has(generation):
                self._attempt(generation)
            else:
                self.members.await_turn(generation, partial(self.run.is_over, generation), self._listener)
        self.standby.end()
        self.run.require_newest()
        self.run.disconnect()
        remove_temporary_folder(self.run.folder, self.task)
        self._finish()
        return 0

    def _act_on_terminate(self, then: str) -> None:
        """Request that the run stops, unless it continues without this task."""
        if not self.members.has(self.run.generation):
            raise SystemExit(EXIT_PEER_LOST)
        self.run.request_stop(self.task.name, then=then)

    def _report_own_death(self) -> None:
        """Act on the death of the whole task, if a heartbeat of this generation says that the engine restarted it."""
        beat = self.run.heartbeat(self.task.name)
        if not beat:
            return
        self.run.begun(beat.generation)  # a network file system may not list it yet
        if beat.generation != self.run.generation or beat.importing or not self.members.has(beat.generation):
            return
        self.exit_code = beat.exit_code
        if self.exit_code is None:
            finished = beat.state in (TaskState.DONE, TaskState.STOPPED)
            self.exit_code = 0 if finished else as_exit_code(-signal.SIGKILL)
        self._last_generation = beat.generation
        attempt = self._attempt_in(beat.generation)
        attempt.end = attempt.recovery.end(beat.generation, EXTERNAL, "the whole task was killed", at=beat.updated_at)
        attempt.begin(Phase.DIED)
        self._watch(attempt)

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
        restarts = attempt_limits.restarts(self.run.folder, self.task.name)
        heartbeat = HeartbeatWriter(self.run.folder, self.task, self.run.generation, restarts)
        heartbeat.update(importing=True)
        heartbeat.start()
        with contextlib.suppress(Exception), quiet.imports():
            fork_server.preload(self._imports, self.run.folder)
        heartbeat.stop()

    # One attempt

    def _attempt_in(self, generation: int) -> Attempt:
        return Attempt(
            self.run,
            self.spec,
            self.task,
            generation,
            scripted=self._kind.scripted,
            rendezvous_timeout_s=self.rendezvous_timeout_s,
            standby=self.standby,
        )

    def _attempt(self, generation: int) -> None:
        """Run the program once in this generation, and act on its end."""
        self.spec = self.members.cluster(generation)  # which may leave out other tasks
        restarts = attempt_limits.restarts(self.run.folder, self.task.name)
        heartbeat = HeartbeatWriter(self.run.folder, self.task, generation, restarts).start()
        if not self._pause(heartbeat, generation):
            heartbeat.stop()
            return
        variables = {"GENERATION": str(generation), "RESTARTS": str(restarts), **self.members.variables(self.spec)}
        self.run.folder.programs(self.task.name).unlink(missing_ok=True)  # of the previous attempt
        standby_cluster.withdraw(self.run.folder, self.task.name)
        formed = standby_cluster.begins(self.run.folder, self.task, generation)
        program = self.standby.take(in_cluster=formed)
        if formed and program is None:
            heartbeat.stop()
            recovery = Restarter(self.run, self.spec, self.task)
            recovery.restart_gang(generation, recovery.end(generation, EXTERNAL, "its standby process had ended"))
            return
        attempt = self._attempt_in(generation)
        attempt.program, attempt.heartbeat = program or self._program(os.environ | variables), heartbeat
        try:
            self._record_processes(attempt.program)
            if self._rendezvous(attempt, formed=formed):
                self.run.require_newest()  # the others may have met another copy of this task
                if self._let_start(attempt, variables, formed=formed):
                    attempt.begin(Phase.RUNNING)
                    self._watch(attempt)
        finally:
            heartbeat.stop()
            code = as_exit_code(attempt.program.end(self._grace_s(attempt)))
            outcome = self.run.outcome
            at_fault = outcome and (outcome.state, outcome.task) == (OutcomeState.FAILED, self.task.name)
            self.exit_code = 0 if attempt.serves and outcome and not at_fault else code

    def _program(self, environment: dict[str, str]) -> TaskProcess:
        """Create the program. It does not join the cluster before `_let_start`."""
        return create(self._kind, self._command, environment, self.run.folder, self.task)

    def _record_processes(self, program: TaskProcess) -> None:
        """Record the processes of this task for the injection of faults."""
        if program.pid:
            with contextlib.suppress(OSError):  # a full disk
                pids = {"agent": os.getpid(), "program": program.pid}
                write_json(self.run.folder.programs(self.task.name), {of: identity(pid) for of, pid in pids.items()})

    def _pause(self, heartbeat: HeartbeatWriter, generation: int) -> bool:
        """Wait before a program that failed by itself starts again; return whether to start it."""
        if generation != self._last_generation:
            begun = self.run.begun(generation)
            self._pause_s = begun.pause_s if begun else 0.0
        seconds, self._pause_s, self._last_generation = self._pause_s, 0.0, generation
        if not seconds:
            return True
        heartbeat.update(state=TaskState.RESTARTING)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.run.is_over(generation) and not self.run.stop_requested:
            time.sleep(POLL_S)
        if self.run.stop_requested and self.task.role.is_sidecar:
            self._wait_until_over(generation)  # it has nothing to save
        elif self.run.stop_requested and not self.spec.restarts_alone(self.task):
            self.run.end("stopped", task=self.task.name)
        return not self.run.is_over(generation)  # a worker starts again even so: the chief saves with its help

    def _rendezvous(self, attempt: Attempt, *, formed: bool) -> bool:
        """Hold the rendezvous with the other tasks; return whether the program may start."""
        if self.task.role == Role.EVALUATOR:
            return True
        generation, program, heartbeat = attempt.generation, attempt.program, attempt.heartbeat
        heartbeat.update(state=TaskState.WAITING)
        if formed:
            self.run.folder.event(self.task.name, "cluster complete", generation=generation)
            return True

        def has_failed() -> bool:
            attempt.finding = None if program.ended else attempt.watchdog.stopped(program.stopped_s)
            return program.ended or attempt.finding is not None

        waiting: task_ports.Waiting = {
            "timeout_s": self.rendezvous_timeout_s,
            "abandon": lambda: self.run.is_over(generation) or self.run.stop_requested or has_failed(),
            "report": lambda obstacle: heartbeat.update(obstacle=obstacle),
        }
        try:
            if attempt.restarts_alone and self.task.name in self._passed_rendezvous(generation):
                # The other tasks passed it long ago and their TensorFlow servers hold their ports. This task's port may
                # still be in use while the kernel frees the memory of its previous program.
                task_ports.listen(self._listener, **waiting).close()
                return True
            rendezvous.wait(
                self.spec,
                self._listener,
                self.run,
                generation,
                token=joining.generation_token(self.run.folder, generation),
                # A task that restarts alone may have been killed after the others had met it, and one that lost its
                # connection to the hub may not know that all have come: the others do not wait for it again.
                passed=partial(self._passed_rendezvous, generation),
                explain=partial(rendezvous.explain_missing, self.run.folder),
                patience=partial(self.members.patience_s, self.rendezvous_timeout_s),
                **waiting,
            )
        except task_ports.Abandoned:
            self._watch(attempt)
            return False
        except ClusterError as error:
            self._act_on_missing(error, attempt)
            return False
        self.run.folder.event(self.task.name, "cluster complete", generation=generation)
        return True

    @property
    def _listener(self) -> Task:
        """The address at which this task listens during the rendezvous.

        All addresses of a container that is on two networks: its name may resolve to either address.
        """
        if self._kind.scripted and self.task.host != "127.0.0.1":
            return replace(self.task, host="0.0.0.0")  # noqa: S104
        return self.task

    def _passed_rendezvous(self, generation: int) -> frozenset[str]:
        """Return the tasks of which an attempt has passed the rendezvous of this generation."""
        complete = ("cluster complete", generation)
        return frozenset(e.task for e in self.run.folder.events() if (e.event, e.generation) == complete)

    def _act_on_missing(self, error: ClusterError, attempt: Attempt) -> None:
        """Act on a rendezvous that tasks missed, or that this task could not hold."""
        missing = error.missing if isinstance(error, rendezvous.Incomplete) else ()
        without = self.members.continue_without
        if missing and without(attempt.recovery, attempt.generation, missing, self.rendezvous_timeout_s):
            return
        if missing and self.members.are_queued_again(attempt.generation):
            self.run.request_stop(TASK_LOST, then=AfterStop.REQUEUE)
            self.run.end("stopped", task=self.task.name)
        else:
            name = min(missing, default=self.task.name)
            self.run.end("failed", task=name, exit_code=error.exit_code, error=str(error))

    def _let_start(self, attempt: Attempt, variables: dict[str, str], *, formed: bool) -> bool:
        """Let the program join the cluster; return whether it may.

        A training program writes the heartbeat itself once its imports are done.
        """
        program, heartbeat = attempt.program, attempt.heartbeat
        attempt.began_at = time.monotonic()
        if attempt.scripted:
            program.open_gate(variables)
            heartbeat.update(state=TaskState.TRAINING)
            self.run.folder.event(self.task.name, "script started")
            self._record_processes(program)  # it has begun only now
            return True
        heartbeat.hand_over()
        if formed:
            variables = {name: value for name, value in variables.items() if name != "TF_CONFIG"}  # it has another one
        elif self.task in self.spec.members:
            attempt.watch()

            def abandon() -> bool:
                attempt.finding = attempt.finding or attempt.watchdog.examine(program.stopped_s)
                has_no_use = self.run.is_over(attempt.generation) or self.run.stop_requested or program.ended
                return attempt.finding is not None or has_no_use

            task_ports.await_servers(self.spec.calls_first(self.task), timeout_s=SERVERS_S, abandon=abandon)
            if attempt.finding:
                self._watch(attempt)
                return False
        program.open_gate(variables)
        return True

    def _grace_s(self, attempt: Attempt) -> float:
        """Seconds to save in; none after a failure, since the others hang in a step, or if nothing was trained."""
        outcome = self.run.outcome
        if attempt.serves or not outcome or outcome.state == OutcomeState.FAILED:
            return 0.0
        grace_s = 1.0 if attempt.state in NOTHING_TO_SAVE else GRACE_S
        if not attempt.scripted:
            return grace_s
        left_s = max(0.0, attempt.grace_ends - time.monotonic()) if attempt.grace_ends else SCRIPT_GRACE_S
        return min(left_s, grace_s)

    # Observe, decide, act

    def _watch(self, attempt: Attempt) -> None:
        """Observe, decide and act, until nothing is left to decide in this attempt."""
        while True:
            facts = attempt.observe()
            if not self._execute(decide.decide(facts), facts, attempt):
                return

    def _wait_until_over(self, generation: int, timeout_s: float = float("inf")) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run.is_over(generation) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _execute(self, action: Action, facts: Facts, attempt: Attempt) -> bool:
        """Execute an action; return whether to observe again."""
        generation = attempt.generation
        if action is Step.LEAVE:
            return False
        if action is Step.REPORT_FAILURE:
            assert facts.end
            ends.record(self.run.folder, generation, facts.end)  # first: a host that is lost now leaves no record
        if facts.finding:
            self._report_finding(facts.finding, attempt, facts.end)
        if facts.phase is Phase.RUNNING and facts.code is not None and facts.scripted:
            ended = TaskState.DONE if facts.code == 0 else TaskState.FAILED
            attempt.heartbeat.update(state=ended, exit_code=as_exit_code(facts.code))
        match action:
            case Step.CONTINUE:
                return self._continue(attempt)
            case Step.REQUEST_END:
                attempt.program.request_end()
                attempt.grace_ends = attempt.grace_ends or time.monotonic() + SCRIPT_GRACE_S
                return self._continue(attempt)
            case Step.AWAIT_OUTCOME:
                attempt.begin(Phase.DONE)
                return True
            case Step.REPORT_FAILURE | Step.AWAIT_REPORTS:
                attempt.begin(Phase.FAILED)
                return True
            case Step.RESUME:
                left_out = membership.left_out(self.run.folder, generation)
                self.run.begin_generation(generation + 1, resumed=True, left_out=left_out)
            case RestartAlone(end):
                self._pause_s = attempt.recovery.restart_alone(end)
                self._resuming = True
            case RestartGang(end):
                attempt.recovery.restart_gang(generation, end)
            case EndRun(state, task, failure):
                self.run.end(state, task=task or self.task.name, **failure)
        return facts.phase is Phase.DONE  # until the folder shows what was recorded

    def _report_finding(self, finding: Stall, attempt: Attempt, end: End | None) -> None:
        """Record a finding; after a hang, let every program print its stacks."""
        if not end:
            return
        self.run.folder.event(finding.task, finding.kind, step=self.run.newest_step, cause=end.cause)
        if finding.kind == "hang":
            attempt.watchdog.report_hang(finding)
            attempt.program.show_stacks()
            self._wait_until_over(attempt.generation, STACKS_S)

    def _continue(self, attempt: Attempt) -> bool:
        """Let a moment pass, in which everything is done that does not depend on decisions."""
        generation = attempt.generation
        if attempt.phase is Phase.STARTING:
            return False  # what ended the rendezvous has passed: hold it again
        if attempt.phase is not Phase.RUNNING:
            time.sleep(POLL_S)
            return True
        if attempt.watchdog.hang_reported:
            attempt.program.show_stacks()
        self.members.take_in_returned(attempt.recovery, generation)
        self._check_standby(generation)
        if self._resuming or (not attempt.scripted and not self.standby.settled):
            self._act_on_training(attempt)
        with contextlib.suppress(subprocess.TimeoutExpired):
            attempt.program.wait(POLL_S)
        return True

    # Next to the program

    def _act_on_training(self, attempt: Attempt) -> None:
        """Report that the program trains again, and keep its standby process."""
        state = attempt.state
        evaluates = self.task.role == Role.EVALUATOR and state == TaskState.EVALUATING
        if self._resuming and (state == TaskState.TRAINING or evaluates):
            self.run.folder.event(self.task.name, "resumed")
            self._resuming = False
        if not attempt.scripted:
            variables = self._standby_variables(attempt.generation)
            self.standby.keep(training=state == TaskState.TRAINING, variables=variables, like=attempt.program.pid)

    def _check_standby(self, generation: int) -> None:
        """Give up a standby process that has ended, and one of a cluster of which another has ended."""
        number = self.standby.cluster
        if self.standby.ended:
            standby_cluster.withdraw(self.run.folder, self.task.name)
            if number is not None:
                standby_cluster.replace_cluster(self.run.folder, generation, number)
        elif number is not None and time.monotonic() - self._standby_checked >= LOOK_S:
            self._standby_checked = time.monotonic()
            if standby_cluster.number(self.run.folder, generation, number) > number:
                self.standby.remove()
                standby_cluster.withdraw(self.run.folder, self.task.name)

    def _standby_variables(self, generation: int) -> dict[str, str] | None:
        """Return the variables of a standby process that forms a cluster with the others; None where it cannot."""
        possible = standby_cluster.trains(self.task) and standby_cluster.possible(self.run.folder, self.spec)
        if not possible or "GPUS_GIVEN" in os.environ:
            return None
        cluster = standby_cluster.of(self.run.folder, self.spec, generation)
        config = tf_config.dumps(cluster, cluster.task(self.task.name))
        number = standby_cluster.number(self.run.folder, generation)
        return {
            "GENERATION": str(generation),
            standby_cluster.VARIABLE: config or "",
            standby_cluster.NUMBER: str(number),
        }

    def _finish(self) -> None:
        """Write the last heartbeat; the chief's agent also writes the summary, unless the run continues elsewhere."""
        outcome = self.run.outcome
        assert outcome is not None
        beat = HeartbeatWriter(self.run.folder, self.task, self.run.generation)
        previous = self.run.heartbeat(self.task.name)
        state = TaskState.DONE if outcome.state == OutcomeState.SUCCEEDED else TaskState(outcome.state)
        if not self.members.has(self.run.generation):
            state = TaskState.STOPPED  # the run ended without it
        elif outcome.state == OutcomeState.FAILED and outcome.task != self.task.name:
            # Another task failed: this one's work was done, or it was ended.
            state = TaskState.DONE if previous and previous.state == TaskState.DONE else TaskState.STOPPED
        beat.current = replace(previous or beat.current, state=state, exit_code=self.exit_code, ended=True)
        beat.write()
        self.run.folder.event(self.task.name, state, step=previous.step if previous else None, exit_code=self.exit_code)
        request = self.run.folder.stop_request
        continues = outcome.state == OutcomeState.STOPPED and request and request.then != AfterStop.END
        if self.task.role == Role.CHIEF and not continues:
            summary.write(self.run.folder, outcome=outcome)
