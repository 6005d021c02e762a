"""The agent of a task: starts the task's program, watches it and the other tasks, and applies the failure policy.

The agent imports the modules of its training programs once and forks each program from itself. A program that cannot be
forked starts early, so that its imports run during the rendezvous of the agents. Either waits at its gate, the pipe
whose descriptor is `GATE_FD`, until the cluster is complete. From then on the agent observes, decides (`decide.py`, the
failure policy) and acts, until the generation is over or the program has to restart.

Agents share the run folder and send each other its new records (cluster/agent/run_view.py), so this works under any
engine that restarts a task whose agent dies. The agent exits with 0 once the outcome is recorded: the engine would
restart it after any other exit code.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from functools import cached_property, partial

from cluster.agent import decide, rendezvous
from cluster.agent.attempt import POLL_S, SCRIPT_GRACE_S, Attempt
from cluster.agent.decide import Action, BareAction, EndRun, Facts, LeaveOut, Phase, RestartAlone, RestartGang
from cluster.agent.elastic import Members
from cluster.agent.run_view import RunView
from cluster.agent.standby import Standby, cluster_variables
from cluster.agent.task_process import TaskProcess, Trainer, temporary_folder
from cluster.agent.watchdog import Stall
from cluster.contract import settings
from cluster.contract.recovery import attempt_limits, ends, snapshot_files, standby_cluster
from cluster.contract.recovery.attempt_limits import EXTERNAL
from cluster.contract.recovery.ends import End
from cluster.contract.results import summary
from cluster.contract.run import membership
from cluster.contract.run.folder import TASK_LOST
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import AfterStop, OutcomeState, TaskState
from cluster.contract.spec import Role, Task
from cluster.system import fork_server, terminal
from cluster.system.errors import EXIT_PEER_LOST, ClusterError
from cluster.system.json_files import write_json
from cluster.system.processes import as_exit_code, identity

LISTED_S = 75.0
"""How long a network file system may hide a new file: the default `acdirmax` of nfs(5) is a minute."""
SERVERS_S = 120.0
"""Timeout for the TensorFlow servers that this task calls first: they listen only once their imports are done."""
STACKS_S = 1.0
"""How long the programs get to print their stacks after a hang."""


class Agent:
    """Runs one task from its start to the run's outcome."""

    def __init__(
        self,
        run: RunView,
        task_name: str,
        command: list[str],
        rendezvous_timeout_s: float,
        *,
        kind: type[TaskProcess] = Trainer,
        imports: str = "",
    ) -> None:
        """Prepare the agent; `imports` is the module whose `load` imports the program's modules, see fork_server.py."""
        self.run = run
        self.spec = membership.cluster_with_addresses(run.folder)
        self.task = self.spec.task(task_name)
        self.exit_code: int | None = None
        self.members = Members(run, self.spec, self.task)
        self.rendezvous_timeout_s = rendezvous_timeout_s
        self._kind, self._command, self._imports = kind, command, imports
        index, log = self.spec.tasks.index(self.task), run.folder.log(task_name)
        self.standby = Standby(self._program, index, len(self.spec.tasks), log)
        self._last_generation = -1
        self._resuming = False
        """Whether to record the event `resumed` once the program trains, after a restart of this task alone."""
        self._pause_s = 0.0
        """How long to wait before the next attempt if only this task restarts."""

    def main(self) -> int:
        """Make attempts until the run has an outcome."""
        then = os.environ.get("STOP_THEN", "")
        signal.signal(signal.SIGTERM, lambda *_: self._act_on_terminate(then))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `invoke up` turns a Ctrl-C into a stop request
        standby_cluster.withdraw_report(self.run.folder, self.task.name)  # an agent that died had a standby process
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
        shutil.rmtree(temporary_folder(self.run.folder, self.task), ignore_errors=True)  # it follows no link
        self._finish()
        return 0

    def _act_on_terminate(self, then: str) -> None:
        """Request that the run stops; if the current generation leaves this task out, just exit."""
        if not self.members.has(self.run.generation):
            raise SystemExit(EXIT_PEER_LOST)
        self.run.request_stop(self.task.name, then=then)

    def _report_own_death(self) -> None:
        """Handle the death of the whole task, if a heartbeat of this generation shows that the engine restarted it."""
        beat = self.run.heartbeat(self.task.name)
        if not beat:
            return
        deadline = time.monotonic() + LISTED_S
        while not self.run.generation_record(beat.generation) and not self.run.is_over(beat.generation - 1):
            if time.monotonic() > deadline or self.run.stop_requested:
                return
            time.sleep(POLL_S)
        if beat.generation != self.run.generation or beat.importing or not self.members.has(beat.generation):
            return
        self.exit_code = beat.exit_code
        if self.exit_code is None:
            self.exit_code = 0 if beat.state in (TaskState.DONE, TaskState.STOPPED) else as_exit_code(-signal.SIGKILL)
        self._last_generation = beat.generation
        attempt = self._attempt_in(beat.generation)
        attempt.end = attempt.recovery.end(beat.generation, EXTERNAL, "the whole task was killed", at=beat.updated_at)
        attempt.begin(Phase.DIED)
        self._watch(attempt)

    def _import(self) -> None:
        """Import the program's modules once, for all attempts. Only Python programs on a CPU can be forked afterwards.

        If the import fails or kills this process, each program imports the modules and reports its own failure.
        """
        accelerated = "GPUS_GIVEN" in os.environ or self.spec.kind.hardware
        if not self._imports or accelerated or not settings.is_on("SHARED_IMPORT") or fork_server.has_preloaded():
            return
        beat = self.run.heartbeat(self.task.name)
        if self.run.outcome or (beat and beat.generation == self.run.generation and beat.importing):
            return  # the run has ended, or the import killed this agent's predecessor
        restarts = attempt_limits.count_restarts(self.run.folder, self.task.name)
        heartbeat = HeartbeatWriter(self.run.folder, self.task, self.run.generation, restarts)
        heartbeat.update(importing=True)
        heartbeat.start()
        with contextlib.suppress(Exception), terminal.quiet_imports():
            fork_server.preload(self._imports, self.run.folder.load_config(), self.spec.strategy)
        heartbeat.stop()

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
        self.spec = self.members.cluster(generation)  # which may leave out other tasks
        restarts = attempt_limits.count_restarts(self.run.folder, self.task.name)
        attempt = self._attempt_in(generation)
        attempt.heartbeat = HeartbeatWriter(self.run.folder, self.task, generation, restarts).start()
        if not self._pause(attempt):
            attempt.heartbeat.stop()
            return
        variables = {"GENERATION": str(generation), "RESTARTS": str(restarts), **self.members.variables(self.spec)}
        self.run.folder.programs(self.task.name).unlink(missing_ok=True)  # left by the previous attempt
        standby_cluster.withdraw_report(self.run.folder, self.task.name)
        formed = standby_cluster.starts_with_standby(self.run.folder, self.task, generation)
        program = self.standby.take(in_cluster=formed)
        if formed and program is None:
            attempt.heartbeat.stop()
            end = attempt.recovery.end(generation, EXTERNAL, "its standby process had ended")
            attempt.recovery.restart_gang(generation, end)
            return
        attempt.program = program or self._program(os.environ | variables)
        try:
            self._record_processes(attempt.program)
            if self._rendezvous(attempt, formed=formed):
                self.run.require_newest()  # the others may have met another copy of this task
                if self._let_start(attempt, variables, formed=formed):
                    attempt.begin(Phase.RUNNING)
                    self._watch(attempt)
        finally:
            code = as_exit_code(attempt.program.end(attempt.grace_s))
            attempt.heartbeat.stop()  # only now: watchers would give up on a script that takes long to save
            outcome = self.run.outcome
            at_fault = outcome and (outcome.state, outcome.task) == (OutcomeState.FAILED, self.task.name)
            self.exit_code = 0 if attempt.serves and outcome and not at_fault else code

    def _program(self, environment: dict[str, str]) -> TaskProcess:
        """Create the program. It does not join the cluster before `_let_start`."""
        if not self.task.role.is_sidecar and not self.spec.serves(self.task) and not self._kind.scripted:
            environment = environment | {snapshot_files.VARIABLE: self._snapshot_files}
        run, name = self.run.folder, self.task.name
        temporary = temporary_folder(run, self.task)
        temporary.mkdir(mode=0o700, exist_ok=True)
        return self._kind(self._command, environment | {"TMPDIR": str(temporary)}, run.log(name), run.work(name))

    @cached_property
    def _snapshot_files(self) -> str:
        """The files in which all programs of this task keep snapshots; they exist as long as this process."""
        return snapshot_files.create()

    def _record_processes(self, program: TaskProcess) -> None:
        if program.pid:
            with contextlib.suppress(OSError):  # a full disk
                pids = {"agent": os.getpid(), "program": program.pid}
                write_json(self.run.folder.programs(self.task.name), {of: identity(pid) for of, pid in pids.items()})

    def _pause(self, attempt: Attempt) -> bool:
        """Wait for the back-off after a program's own failure; return whether to start the program."""
        if attempt.generation != self._last_generation:
            begun = self.run.generation_record(attempt.generation)
            self._pause_s = begun.pause_s if begun else 0.0
        seconds, self._pause_s, self._last_generation = self._pause_s, 0.0, attempt.generation
        if seconds:
            attempt.heartbeat.update(state=TaskState.RESTARTING)
            attempt.pause_ends = time.monotonic() + seconds
            attempt.begin(Phase.PAUSED)
            self._watch(attempt)
        return attempt.phase is Phase.STARTING

    def _rendezvous(self, attempt: Attempt, *, formed: bool) -> bool:
        """Hold the rendezvous with the other tasks; return whether the program may start."""
        if self.task.role == Role.EVALUATOR:
            return True
        attempt.heartbeat.update(state=TaskState.WAITING)
        if formed:
            self.run.folder.event(self.task.name, "cluster complete", generation=attempt.generation)
            return True
        try:
            self.members.meet(attempt, self._listener, self.rendezvous_timeout_s)
            return True
        except rendezvous.Abandoned:
            pass
        except ClusterError as error:
            attempt.missed = self.members.describe_missed(attempt.generation, error, self.rendezvous_timeout_s)
            attempt.begin(Phase.INCOMPLETE)
        self._watch(attempt)
        return False

    @property
    def _listener(self) -> Task:
        """The task with its listening address: all of a container or node, whose name may mean another (127.0.1.1)."""
        if (self._kind.scripted or "CLUSTER_JSON" in os.environ) and self.task.host != "127.0.0.1":
            return replace(self.task, host="0.0.0.0")  # noqa: S104
        return self.task

    def _let_start(self, attempt: Attempt, variables: dict[str, str], *, formed: bool) -> bool:
        """Let the program join the cluster, unless it turns out to be stalled; return whether it may join.

        A training program writes the heartbeat itself once its imports are done.
        """
        program, heartbeat = attempt.program, attempt.heartbeat
        attempt.began_at = time.monotonic()
        if attempt.scripted:
            program.open_gate(variables)
            heartbeat.update(state=TaskState.TRAINING)
            self.run.folder.event(self.task.name, "script started")
            self._record_processes(program)  # a script starts only now
            return True
        heartbeat.hand_over()
        if formed:
            variables = {name: value for name, value in variables.items() if name != "TF_CONFIG"}  # it has its own
        elif self.task in self.spec.members:
            attempt.watch()

            def abandon() -> bool:
                attempt.finding = attempt.finding or attempt.watchdog.examine(program.stopped_s)
                has_no_use = self.run.is_over(attempt.generation) or attempt.gives_up or program.ended
                return attempt.finding is not None or has_no_use

            called, callers = self.spec.calls_first(self.task), len(self.spec.members)
            rendezvous.await_servers(called, timeout_s=SERVERS_S, abandon=abandon, callers=callers)
            if attempt.finding:
                self._watch(attempt)
                return False
        program.open_gate(variables)
        return True

    def _watch(self, attempt: Attempt) -> None:
        while True:
            facts = attempt.observe()
            if not self._execute(decide.decide(facts), facts, attempt):
                return

    def _execute(self, action: Action, facts: Facts, attempt: Attempt) -> bool:
        """Execute an action; return whether to observe again."""
        generation = attempt.generation
        if action is BareAction.LEAVE:
            return False
        if action is BareAction.REPORT_FAILURE:
            assert facts.end
            ends.record_end(self.run.folder, generation, facts.end)  # first: this host may be lost
        if facts.finding and facts.end:
            self._report_finding(facts.finding, attempt, facts.end)
        if facts.phase is Phase.RUNNING and facts.code is not None and facts.scripted:
            finished = TaskState.STOPPED if facts.stop_requested else TaskState.DONE
            ended = finished if facts.code == 0 else TaskState.FAILED
            attempt.heartbeat.update(state=ended, exit_code=as_exit_code(facts.code))
        match action:
            case BareAction.START:
                attempt.begin(Phase.STARTING)
            case BareAction.CONTINUE:
                return self._continue(attempt)
            case BareAction.REQUEST_END:
                attempt.request_end()
                return self._continue(attempt)
            case BareAction.AWAIT_OUTCOME:
                attempt.begin(Phase.DONE)
                return True
            case BareAction.REPORT_FAILURE | BareAction.AWAIT_REPORTS:
                attempt.begin(Phase.FAILED)
                return True
            case _:
                self._end_generation(action, attempt)
        return facts.phase is Phase.DONE  # until the folder shows the recorded outcome

    def _end_generation(self, action: Action, attempt: Attempt) -> None:
        generation = attempt.generation
        match action:
            case RestartAlone(end):
                self._pause_s = attempt.recovery.restart_alone(end)
                self._resuming = True
            case RestartGang(end):
                attempt.recovery.restart_gang(generation, end)
            case LeaveOut(tasks, end):
                attempt.recovery.change_members(generation, tasks, end, "left out")
            case BareAction.RESUME:
                left_out = membership.left_out(self.run.folder, generation)
                self.run.begin_generation(generation + 1, resumed=True, left_out=left_out)
            case BareAction.QUEUE_AGAIN:
                if not self.run.is_over_by_now(generation):  # the chief may have continued without this task
                    self.run.request_stop(TASK_LOST, then=AfterStop.REQUEUE)
                    self.run.end("stopped", task=self.task.name)
            case EndRun(state, task, failure):
                if not failure or not self.run.is_over_by_now(generation):
                    self.run.end(state, task=task or self.task.name, **failure)

    def _report_finding(self, finding: Stall, attempt: Attempt, end: End) -> None:
        """Record a stall; after a hang, let every program print its stacks."""
        self.run.folder.event(finding.task, finding.kind, step=self.run.newest_step, cause=end.cause)
        if finding.kind == "hang":
            attempt.watchdog.report_hang(finding)
            attempt.program.show_stacks()
            deadline = time.monotonic() + STACKS_S
            while not self.run.is_over(attempt.generation) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _continue(self, attempt: Attempt) -> bool:
        """Wait briefly and do the periodic work that no decision depends on; return whether to observe again."""
        generation = attempt.generation
        if attempt.phase is Phase.STARTING:
            return False  # the reason for the missed rendezvous is gone: hold it again
        if attempt.phase is not Phase.RUNNING:
            time.sleep(POLL_S)
            return True
        if attempt.watchdog.hang_reported:
            attempt.program.show_stacks()
        self.members.take_in_returned(attempt.recovery, generation)
        self.standby.leave_broken_cluster(self.run.folder, self.task, generation)
        keeps_standby = not attempt.scripted and not self.standby.settled
        state = attempt.state if self._resuming or keeps_standby else ""
        evaluates = self.task.role == Role.EVALUATOR and state == TaskState.EVALUATING
        if self._resuming and (state == TaskState.TRAINING or evaluates):
            self.run.folder.event(self.task.name, "resumed")
            self._resuming = False
        if keeps_standby:
            variables = cluster_variables(self.run.folder, self.spec, self.task, generation)
            self.standby.keep(training=state == TaskState.TRAINING, variables=variables, like=attempt.program.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            attempt.program.wait(attempt.poll_s, self.run.bell)
        return True

    def _finish(self) -> None:
        """Write the last heartbeat and, in the chief's agent, the summary, unless the run continues elsewhere."""
        outcome = self.run.outcome
        assert outcome is not None
        beat = HeartbeatWriter(self.run.folder, self.task, self.run.generation)
        previous = self.run.heartbeat(self.task.name)
        state = TaskState.DONE if outcome.state == OutcomeState.SUCCEEDED else TaskState(outcome.state)
        if not self.members.has(self.run.generation):
            state = TaskState.STOPPED  # the run ended without this task
        elif outcome.state == OutcomeState.FAILED and outcome.task != self.task.name:
            # Another task failed; this one had finished its work or was ended.
            state = TaskState.DONE if previous and previous.state == TaskState.DONE else TaskState.STOPPED
        beat.current = replace(previous or beat.current, state=state, exit_code=self.exit_code, ended=True)
        beat.write()
        self.run.folder.event(self.task.name, state, step=previous.step if previous else None, exit_code=self.exit_code)
        if self.task.role == Role.CHIEF and not self.run.continues_elsewhere:
            grace_s = SCRIPT_GRACE_S if self._kind.scripted and outcome.state == OutcomeState.STOPPED else 0.0
            summary.write_summary(self.run.folder, summary.SETTLE_S + grace_s, outcome)
