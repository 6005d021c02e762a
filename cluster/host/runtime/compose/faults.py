"""Faults of containers, by the engine."""

from __future__ import annotations

import json
import os

from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.runtime.compose import overlay
from cluster.host.runtime.faults import SLOWED_SHARE, FaultInjector
from cluster.system import memory
from cluster.system.errors import ClusterError

PAUSE_TRIES = 5

_HOG = """
import os, sys
eaten, program = [], int(sys.argv[1])
while os.path.exists(f"/proc/{program}") and len(eaten) < int(sys.argv[2]):
    eaten.append(b"x" * 2**24)
"""
"""Eats memory, 16 MiB at a time, until the program is gone: the kernel kills the largest process first."""


class ContainerFaults(FaultInjector):
    """Disturbs containers, by the engine."""

    storm = FaultInjector.storm | {"partition", "oom", "lose"}

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._undo: list[tuple[str, ...]] = []
        self._at: tuple[str, ...] = ()
        """How Docker's client reaches the engine of the task that was looked for last."""

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal inside the container: `docker kill` would count as a stop by hand, and nothing come back."""
        found = self.processes(task)
        words = " ".join(str(int(found[which]["pid"])) for which in whose)  # the task's own word, for a shell
        # Where the agent dies, so does the container, and this command with it.
        container = self._container(task)
        self._ask("exec", container, "sh", "-c", f"kill -{number} {words}")

    def reaches(self, task: str, which: str) -> bool:
        """Return whether the process still runs in the task's container."""
        found = int(self.processes(task)[which]["pid"])
        return self._ask("exec", self._container(task), "sh", "-c", f"kill -0 {found}")[0] == 0

    def pause(self, task: str) -> None:
        """Pause the container."""
        container = self._container(task)
        # On a busy machine with cgroup v1 runc gives up ("unable to freeze") where the next try succeeds.
        for _ in range(PAUSE_TRIES - 1):
            if self._ask("pause", container)[0] == 0:
                break
        else:
            self._docker("pause", container)
        self._undo.append((*self._at, "unpause", container))

    def partition(self, task: str) -> None:
        """Disconnect the container from the cluster's network."""
        container = self._container(task)
        networks = json.loads(self._docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", container))
        name = next((name for name in networks if name.endswith("_cluster")), None)
        if name is None:
            raise ClusterError(f"{task} is off the cluster's network already")
        self._docker("network", "disconnect", "--force", name, container)
        self._undo.append((*self._at, "network", "connect", "--alias", task, name, container))

    def lose(self, task: str) -> None:
        """Kill the container in a way after which the engine does not bring it back."""
        container = self._container(task)
        self._docker("kill", container)
        self._undo.append((*self._at, "start", container))

    def slow(self, task: str) -> None:
        """Limit the container's share of the processor."""
        container = self._container(task)
        self._docker("update", "--cpus", str(SLOWED_SHARE), container)
        self._undo.append((*self._at, "update", "--cpus", str(os.cpu_count() or 1), container))

    def oom(self, task: str) -> None:
        """Leave the container hardly more memory than it uses, and have another process in it eat that."""
        container, program = self._container(task), self.processes(task)["program"]["pid"]
        # cgroup v2's file, else v1's.
        files = "/sys/fs/cgroup/memory.current /sys/fs/cgroup/memory/memory.usage_in_bytes"
        used = int(self._docker("exec", container, "sh", "-c", f"cat {files} 2>/dev/null | head -n 1"))
        limited = int(self._docker("inspect", "--format", "{{.HostConfig.Memory}}", container))
        limit = used + 2**27
        self._docker("update", "--memory", str(limit), "--memory-swap", str(limit), container)
        before = str(limited or memory.available_bytes() + limit)  # the engine takes no limit back
        self._undo.append((*self._at, "update", "--memory", before, "--memory-swap", before, container))
        # Killed or not, what counts is the program's end.
        self._ask("exec", container, "python", "-c", _HOG, str(program), str(limit // 2**24 + 16), timeout_s=60)

    def undo(self, task: str) -> None:
        """Undo what lasts, the last first."""
        while self._undo:
            engine.ask(*self._undo.pop())
        super().undo(task)

    def _container(self, task: str) -> str:
        self._at = self._engine(task)
        filters = [word for each in self._filters(task) for word in ("--filter", each)]
        found = self._docker("ps", "--quiet", *filters)
        if not found:
            raise ClusterError(f"{task} has no container that runs; `docker ps --all` shows those that do not")
        return found.split()[0]

    def _engine(self, task: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the words by which Docker's client reaches the engine that runs a task; none for its own."""
        return ()

    def _filters(self, task: str) -> list[str]:
        """Return what `docker ps` finds a task's container by."""
        return [
            f"label=com.docker.compose.project={overlay.project(self._run.path)}",
            f"label={overlay.TASK_LABEL}={task}",
        ]

    def _ask(self, *words: str, timeout_s: float = engine.ANSWER_TIMEOUT_S) -> tuple[int, str]:
        return engine.ask(*self._at, *words, timeout_s=timeout_s)

    def _docker(self, *words: str) -> str:
        code, output = self._ask(*words, timeout_s=30)
        if code:
            raise ClusterError(f"docker {' '.join(words[:2])}: {' '.join(output.split())}")
        return output
