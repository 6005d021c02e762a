"""Faults of the tasks of a Slurm job, by signals on their nodes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import MappingProxyType

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Place
from cluster.host.runtime.faults import FaultInjector
from cluster.system import processes
from cluster.system.errors import ClusterError

SRUN_S = 60.0


class SlurmFaults(FaultInjector):
    """Injects faults into the tasks of a job, by signals on their nodes."""

    storm = frozenset({"kill", "pause", "corrupt"})
    refusals = MappingProxyType(
        dict.fromkeys(("partition", "slow", "oom"), "no signal does that; use a run of --runtime docker")
    )

    def __init__(self, run: RunFolder, job: Callable[[], str]) -> None:
        super().__init__(run)
        self._job = job
        self._frozen: set[str] = set()

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal, in a step of the job on the task's node."""
        found = self.processes(task)
        words = [str(int(found[which]["pid"])) for which in whose]
        place = self._place(task)
        job, node = (place and place.job) or self._job(), place.node if place else ""
        step = ["srun", f"--jobid={job}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
        code, _, complained = processes.run([*step, "kill", f"-{number}", *words], SRUN_S)
        if code:
            raise ClusterError(
                f"srun on {node or 'a node'} of job {job or 'none'}: {' '.join(complained.split())[:200]}"
            )

    def _place(self, task: str) -> Place | None:
        """Return where a task was last; a replacement of it is in a job of its own."""
        attempts = sorted((self._run.control / "slurm").glob(f"*/{task}.json"), key=lambda path: path.stat().st_mtime)
        return records.read(attempts[-1], Place.from_json) if attempts else None

    def pause(self, task: str) -> None:
        """Stop the agent first: otherwise it would end the frozen program."""
        self._frozen.add(task)
        self.signal(task, signal.SIGSTOP, "agent", "program")

    def undo(self, task: str) -> None:
        """Undo lasting faults; the program may have ended meanwhile."""
        if task in self._frozen:
            self._frozen.discard(task)
            with contextlib.suppress(ClusterError):
                self.signal(task, signal.SIGCONT, "program", "agent")
        super().undo(task)
