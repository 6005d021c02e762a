"""Faults of local processes, by signals and limits."""

from __future__ import annotations

import resource
import signal
import threading
from pathlib import Path
from types import MappingProxyType

from cluster.contract.run.folder import RunFolder
from cluster.host.runtime.faults import SLOWED_SHARE, FaultInjector
from cluster.system import processes

SLICE_S = 0.5


class ProcessFaults(FaultInjector):
    """Injects faults into local processes, by signals and limits."""

    storm = FaultInjector.storm | {"lose"}
    refusals = MappingProxyType({"partition": "local tasks share one network; use a run of --runtime docker"})

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._frozen: list[dict[str, int]] = []
        self._lost: list[Path] = []
        self._undone = threading.Event()
        self._slowing: threading.Thread | None = None

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal."""
        found = self.processes(task)
        for which in whose:
            processes.kill(found[which], number)

    def reaches(self, task: str, which: str) -> bool:
        """Return whether the process still runs."""
        return processes.alive(self.processes(task)[which])

    def pause(self, task: str) -> None:
        """Stop the agent first: otherwise it would end the frozen program."""
        self._frozen = [self.processes(task)[which] for which in ("agent", "program")]
        for process in self._frozen:
            processes.kill(process, signal.SIGSTOP)

    def lose(self, task: str) -> None:
        """Kill the whole task, which the supervisor does not bring back."""
        away = self._run.away(task)
        away.parent.mkdir(exist_ok=True)
        away.touch()
        self._lost.append(away)
        self.signal(task, signal.SIGKILL, "agent", "program")

    def slow(self, task: str) -> None:
        """Stop and continue the program, again and again."""
        self._undone.clear()
        self._slowing = threading.Thread(target=self._stop_and_go, args=(self.processes(task)["program"],), daemon=True)
        self._slowing.start()

    def _stop_and_go(self, program: dict[str, int]) -> None:
        while not self._undone.wait(SLICE_S * SLOWED_SHARE):
            processes.kill(program, signal.SIGSTOP)
            self._undone.wait(SLICE_S * (1 - SLOWED_SHARE))
            processes.kill(program, signal.SIGCONT)

    def oom(self, task: str) -> None:
        """Allow the program no more memory than it has: its next allocation fails."""
        recorded = self.processes(task)["program"]
        if not processes.alive(recorded):
            return
        program = recorded["pid"]
        pages = int(Path(f"/proc/{program}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(program, resource.RLIMIT_AS, (size, size))

    def undo(self, task: str) -> None:
        """Undo lasting faults."""
        self._undone.set()
        if self._slowing:
            self._slowing.join()
            self._slowing = None
        while self._lost:
            self._lost.pop().unlink(missing_ok=True)
        while self._frozen:  # the program first: its agent would take it for frozen by itself
            processes.kill(self._frozen.pop(), signal.SIGCONT)
        super().undo(task)
