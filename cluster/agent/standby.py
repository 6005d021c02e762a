"""The standby process: the next attempt's program, started while the current one trains, and waiting at its gate.

Importing TensorFlow, forming the cluster and tracing the step take most of a restart. A standby process does the
imports in advance and, where possible, all three: see `cluster/contract/recovery/standby_cluster.py`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cluster.agent.task_process import MemoryKills, TaskProcess
from cluster.contract import settings, tf_config
from cluster.contract.recovery import standby_cluster
from cluster.contract.run import logs
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec, Task
from cluster.system import memory

STAGGER_S = 2.0
"""Interval between the tasks' starts of standby processes, the first once its program has trained for
`STANDBY_DELAY_S`, so that they do not slow down the start of the run."""
AFTER_FAILURE_S = 1.0
"""The shorter delay after a restart: another failure may follow soon, and the run's start is over."""
STOPPED_S = 8.0
"""A standby process that a signal has kept stopped for longer than this is replaced."""
AGAIN_S = 15.0
"""Initial back-off from the end of a standby process to the start of the next; it doubles each time. By then the other
agents have ended the standby processes of the same cluster, too."""
LONGEST_AGAIN_S = 600.0
LOOK_S = 0.5
"""How often an agent checks whether the cluster of standby processes has lost a member."""
MEMORY_BYTES = 700 * 2**20
"""The memory of a program that has imported TensorFlow."""
FIRST_TO_KILL = 1000
"""The highest `oom_score_adj`: the kernel kills a standby process before any training program."""
RESERVE_BYTES = 2 * 2**30
"""Memory of the machine that standby processes leave free for the training programs."""
OWN_RESERVE_BYTES = 2**29
"""Memory within the task's limit that a standby process leaves free."""


class Standby:
    """Keeps one task's standby process, once the task has trained for a while."""

    def __init__(self, start: Callable[[dict[str, str]], TaskProcess], index: int, num_tasks: int, log: Path) -> None:
        """Prepare to `start` programs, for the task at `index` of `num_tasks`, all of which may share this machine."""
        self._start, self._log = start, log
        self._delay_s = self._next_delay_s = settings.seconds("STANDBY_DELAY_S")
        if not settings.is_set("STANDBY_DELAY_S"):
            self._delay_s += STAGGER_S * index
            self._next_delay_s = AFTER_FAILURE_S
        self._enabled = settings.is_on("STANDBY")
        self._num_tasks = num_tasks
        self._program: TaskProcess | None = None
        self.cluster: int | None = None
        """The number of the cluster that the process forms with other standby processes, the only ones that it can then
        train with; None if it forms none."""
        self._training_since: float | None = None
        self._memory_kills = MemoryKills()
        self._again_at = self._cluster_looked_at = 0.0
        self._kills = self._removed = 0

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do: the standby process runs, or is disabled."""
        return (self._program is not None and not self.ended) or not self._enabled

    @property
    def ended(self) -> bool:
        """Whether the standby process has ended by itself, or a signal keeps it stopped."""
        return self._program is not None and (self._program.ended or self._program.stopped_s > STOPPED_S)

    @property
    def kills(self) -> int:
        """Number of standby processes killed since `take`."""
        return self._kills + int(self._program is not None and self._was_killed(self._program))

    def _was_killed(self, program: TaskProcess) -> bool:
        return program.ended and program.wait() == -signal.SIGKILL

    def keep(self, *, training: bool, variables: dict[str, str] | None = None, like: int = 0) -> None:
        """Start the standby process when it is due; to be called often while the task's program runs.

        The delay counts from the first time that the program is `training`. With `variables`, the process forms a
        cluster with the others, and then needs as much memory as the process whose id is `like`.
        """
        now = time.monotonic()
        if self._training_since is None:
            self._training_since = now if training else None
            return
        if self.ended:
            self.remove()
        if self.settled or now < max(self._training_since + self._delay_s, self._again_at):
            return
        needed = MEMORY_BYTES if variables is None else max(MEMORY_BYTES, memory.used_bytes(like))
        short = memory.available_bytes() < RESERVE_BYTES + needed * self._num_tasks
        if short or memory.headroom_bytes() < OWN_RESERVE_BYTES + needed:
            self._enabled = False
            return
        self._memory_kills = MemoryKills()
        try:
            self._program = self._start(dict(os.environ) | {"STANDBY_PROCESS": "1"} | (variables or {}))
        except (OSError, RuntimeError) as error:  # no disk, process, descriptor or thread is left; training needs none
            self._enabled = False
            logs.append_output(self._log, f"warning: no standby process could be started: {error}\n".encode())
            return
        self.cluster = None if variables is None else int(variables[standby_cluster.NUMBER])
        self._set_kill_score(FIRST_TO_KILL)

    def remove(self) -> None:
        """Remove a standby process that has ended or become useless; `keep` starts another unless memory is short."""
        program, self._program, self.cluster = self._program, None, None
        assert program
        if self._was_killed(program):
            self._kills += 1
            self._enabled = not self._memory_kills.include(program, -signal.SIGKILL)
        program.end(0.0)
        self._again_at = time.monotonic() + min(LONGEST_AGAIN_S, AGAIN_S * 2**self._removed)
        self._removed += 1

    def take(self, *, in_cluster: bool = False) -> TaskProcess | None:
        """Hand over the standby process for the next attempt, with its cluster if `in_cluster`; None without one."""
        if self._training_since is not None:
            self._training_since, self._delay_s = None, self._next_delay_s
        self._again_at, self._kills = 0.0, 0
        self._set_kill_score(0)
        program, self._program = self._program, None
        formed, self.cluster = self.cluster is not None, None
        if program and (program.ended or program.is_stopped or formed != in_cluster):
            program.end(0.0)
            return None
        return program

    def _set_kill_score(self, score: int) -> None:
        if self._program and not self._program.ended:  # the id of an ended process may be reused
            with contextlib.suppress(OSError):  # it has ended
                Path(f"/proc/{self._program.pid}/oom_score_adj").write_text(str(score))

    def end(self) -> None:
        if program := self.take(in_cluster=self.cluster is not None):
            program.end(0.0)

    def leave_broken_cluster(self, run: RunFolder, task: Task, generation: int) -> None:
        """Withdraw a standby process that has ended, or whose standby cluster has lost another process."""
        number = self.cluster
        if self.ended:
            standby_cluster.withdraw_report(run, task.name)
            if number is not None:
                standby_cluster.replace_cluster(run, generation, number)
        elif number is not None and time.monotonic() - self._cluster_looked_at >= LOOK_S:
            self._cluster_looked_at = time.monotonic()
            if standby_cluster.newest_number(run, generation, number) > number:
                self.remove()
                standby_cluster.withdraw_report(run, task.name)


def cluster_variables(run: RunFolder, spec: ClusterSpec, task: Task, generation: int) -> dict[str, str] | None:
    """Return the environment with which a standby process forms a cluster with the others; None if it cannot."""
    if "GPUS_GIVEN" in os.environ or task.role.is_sidecar or not standby_cluster.is_possible(run, spec):
        return None
    cluster = standby_cluster.spec_of_generation(run, spec, generation)
    return {
        "GENERATION": str(generation),
        standby_cluster.VARIABLE: tf_config.dumps(cluster, cluster.task(task.name)) or "",
        standby_cluster.NUMBER: str(standby_cluster.newest_number(run, generation)),
    }
