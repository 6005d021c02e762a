"""The supervisor of a local run: one process that does for local tasks what an engine does for containers.

    python -m cluster.host.runtime.supervisor RUN_DIR

It starts an agent for every task listed in the run's `compose.json`, restarts agents that are killed, and ends when all
of them have ended. The kernel kills the agents and their programs if the supervisor dies.

Its parent, the keeper, makes sure that the run leaves no process behind. The kernel makes the keeper the parent of
every orphaned descendant, including daemons that began another session and cleared their environment. When the
supervisor, initially the keeper's only child, ends for any reason, the keeper kills all remaining descendants. Only a
process that is started after the keeper was killed with SIGKILL can survive. The keeper first enters the run's private
network, if it has one, so that all its descendants are in it.
"""

import contextlib
import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.contract.recovery import attempt_limits, ends, step_record
from cluster.contract.results import summary
from cluster.contract.run import launch_records, owner, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.host.runtime import namespaces
from cluster.host.runtime.payload import process_variables
from cluster.host.runtime.resources import HOST, PRIVATE
from cluster.system import fork_server, processes
from cluster.system.errors import EXIT_FAILED, TimedOut
from cluster.system.files import open_file, remove_abandoned, scratch_folder
from cluster.system.messages import counted
from cluster.system.waiting import wait_until

if TYPE_CHECKING:
    from cluster.host.runtime.warm import EarlySupervisor

SUPERVISOR_STOPPED_S = 8.0
"""After this long, a supervisor that a signal has stopped is continued: it restarts no agents while stopped."""
KILL_TIMEOUT_S = 10.0
"""Longest wait for killed processes to end; a process in an uninterruptible system call may take longer."""
AGENT = "cluster.agent.agent"
"""The module that the supervisor imports once, to fork every agent. A name, since images have no `cluster.host`."""
POLL_S = 0.05
AGENT_STOPPED_S = 15.0
"""An agent that a signal has kept stopped for longer than this is replaced. The other agents notice a bit earlier."""
REFUSED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a system that has no room for another process."""
RETRY_S = 1.0
"""How long no agent is started after such an error."""
START_S = 120.0
"""Timeout for a live supervisor's first heartbeats, which take a few seconds at most on an idle machine."""


def keep(work: Callable[[], None], on_terminate: Callable[[], object]) -> None:
    """Run `work` in a child process; exit with the child's code once all of its descendants have ended."""
    processes.adopt_orphans()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        processes.die_with_parent()
        if os.getppid() != keeper:  # the keeper died before `die_with_parent` took effect
            os._exit(128 + signal.SIGKILL)
        work()
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, lambda *_: on_terminate())
    code = _reap_until(child)
    _kill_the_rest()
    raise SystemExit(code)


def _reap_until(child: int) -> int:
    recorded = processes.identity(child)
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            if pid == child:
                timer = threading.Timer(SUPERVISOR_STOPPED_S, processes.kill, (recorded, signal.SIGCONT))
                timer.daemon = True
                timer.start()
        elif pid == child:
            return processes.as_exit_code(os.waitstatus_to_exitcode(status))


def _kill_the_rest() -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := (table := processes.ProcessTable()).descendants(os.getpid()):
        for pid in left:
            table.kill(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def command(run: RunFolder) -> list[str]:
    """Return the command that starts a run's supervisor."""
    return [sys.executable, "-m", "cluster.host.runtime.supervisor", str(run.path)]


def start_supervisor(run: RunFolder, early: "EarlySupervisor | None" = None) -> None:
    """Start the run's supervisor in the background, in a separate session, or hand the run over to `early`."""
    owned = owner.create_owner(run, "local", early.token if early else "")
    with open_file(run.log("supervisor"), "ab") as log:
        if early:
            pid = early.pid
        else:
            environment = variables(run.composed) | {"RUN_DIR": str(run.path), owner.TOKEN: owned.token}
            pid = processes.start_detached(command(run), environment=environment, output=log).pid
    recorded: dict[str, Any] = processes.identity(pid)
    owner.record_supervisor(run, owned, recorded)
    if early:
        early.hand_over()
    wait_until(lambda: run.status("chief").exists() or not processes.alive(recorded), START_S, POLL_S)
    if not run.status("chief").exists():
        raise TimedOut(f"the supervisor of {run.name} did not start its tasks; see {run.log('supervisor')}")


def variables(how: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that all tasks have in common, with which the supervisor imports modules for all."""
    environments = [task["environment"].items() for task in how.get("tasks", {}).values()]
    same = dict(set(environments[0]).intersection(*environments[1:])) if environments else {}
    return process_variables(how.get("inherits", ())) | same


def is_running(run: RunFolder) -> bool:
    """Whether the run's supervisor is alive."""
    owned = owner.read_owner(run)
    return owned is not None and owned.alive


def processes_left(run: RunFolder, table: processes.ProcessTable | None = None) -> list[int]:
    """Return the ids of the run's processes; several calls can share one table of all processes."""
    owned = owner.read_owner(run)
    return owned.processes(table or processes.ProcessTable()) if owned else []


def kill_run(run: RunFolder) -> int:
    """Kill every process of the run; return their number."""
    owned = owner.read_owner(run)
    killed = processes.kill_all(owned.processes, f"run {run.name}") if owned else 0
    remove_abandoned()
    return killed


class Supervisor:
    """Starts the agents and restarts those that are killed or fail."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        how = records.read_record(run.compose, launch_records.compose)
        self.preload: str = how.get("preload", "")
        self.tasks: dict[str, Any] = how["tasks"]
        self.agents: dict[str, subprocess.Popen[bytes] | fork_server.ForkedProcess] = {}
        self._stop_timers: dict[str, processes.StopTimer] = {}
        self._failures: dict[str, list[records.EndedAttempt]] = {name: [] for name in self.tasks}
        self._due: dict[str, float] = {}
        """When to start or restart each agent that does not run, by the monotonic clock."""
        self._refused_at = float("-inf")

    def main(self) -> None:
        """Start and restart the agents until every one has ended for good."""
        signal.signal(signal.SIGTERM, lambda *_: self.run.request_stop("supervisor"))
        importlib.import_module(AGENT)
        if self.preload and not fork_server.has_preloaded():
            self._preload()
        self._due = dict.fromkeys(self.tasks, time.monotonic())
        self._start_those_due()
        while self.agents or self._due:
            for name, agent in list(self.agents.items()):
                if processes.has_ended(agent):
                    processes.kill_session(agent.pid)  # no other session has this id until the agent is reaped
                    self._act_on_exit(name, agent.wait())
                elif self._stop_timers[name].look(agent.pid) > AGENT_STOPPED_S:
                    processes.signal_group(agent, signal.SIGKILL)
            self._start_those_due()
            time.sleep(POLL_S)
        # The chief's agent has written the summary, unless it was killed at the very end or the run continues.
        if not self.run.load_summary() and not self.run.continues_elsewhere:
            self.run.end("failed", error="the agents ended without an outcome; see logs/")
            summary.write_summary(self.run, settle_s=0)

    def _preload(self) -> None:
        """Import the modules of all tasks once; their agents and programs are then forks of this process."""
        spec = self.run.load_cluster()
        beats = [HeartbeatWriter(self.run, spec.task(name), self.run.generation) for name in self.tasks]
        for beat in beats:
            beat.update(importing=True)
            beat.start()
        try:
            fork_server.preload(self.preload, self.run.load_config(), spec.strategy)
        except Exception:  # each task fails in the same way, and logs it
            traceback.print_exc()
        finally:
            for beat in beats:
                beat.stop()

    def _start(self, name: str) -> None:
        task = self.tasks[name]
        with open_file(self.run.log(name), "ab") as log:
            self._stop_timers[name] = processes.StopTimer()
            self.agents[name] = fork_server.start(
                task["command"],
                fork=True,
                env=os.environ | task["environment"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the agent itself writes the program's output to the log
                stderr=log,
                preexec_fn=processes.die_with_parent,
                start_new_session=True,
            )

    def _act_on_exit(self, name: str, code: int) -> None:
        """Schedule the restart of an agent that was killed or has failed, or fail the run after too many failures."""
        del self.agents[name]
        if code == 0:
            return
        kind = ends.classify_code(code, out_of_memory=False)
        saved, step = max(self.run.saved_steps, default=-1), step_record.newest_step(self.run, self.run.generation)
        tried = self._failures[name]
        tried.append(records.EndedAttempt(kind, step, saved))
        if count := attempt_limits.count_over_limit(tried, *attempt_limits.restart_limits(self.run)):
            why = f"{processes.describe_exit(code)} on {socket.gethostname()}; see {self.run.log(name)}"
            cause = f"its agent failed {counted(count, 'time')} without progress: {why}"
            self.run.end("failed", task=name, exit_code=EXIT_FAILED, error=cause)
        else:
            self._due[name] = time.monotonic() + attempt_limits.pause_s(tried)

    def _start_those_due(self) -> None:
        """Start the agents whose back-off is over; none once the run has ended."""
        if time.monotonic() < self._refused_at + RETRY_S:
            return
        for name, due in list(self._due.items()):
            if self.run.outcome and self.run.load_summary():
                del self._due[name]
            elif self.run.away(name).exists():
                continue
            elif time.monotonic() >= due or self.run.outcome or self.run.stop_requested:
                try:
                    self._start(name)
                except OSError as error:
                    if error.errno not in REFUSED:
                        raise
                    print(f"the agent of {name} cannot be started: {error}; trying again", flush=True)
                    self._refused_at = time.monotonic()
                    return
                del self._due[name]


def main(run: RunFolder, *, in_network: bool = False) -> None:
    """Run the keeper and the supervisor. `in_network`: whether this process is already in the run's network."""
    supervisor = Supervisor(run)
    if run.composed.get("network", HOST) == PRIVATE and not in_network:
        namespaces.enter()
    with scratch_folder() as scratch:
        os.environ["TMPDIR"], tempfile.tempdir = str(scratch), None
        keep(supervisor.main, lambda: run.request_stop("supervisor"))


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])))
