"""What can be done to a task from outside, as the world does it: to its processes, its network, its memory, its disk.

Locally by signals and limits on processes, in containers by the engine; what the one or the other cannot do is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
from abc import ABC, abstractmethod
from pathlib import Path

from cluster.errors import ClusterError, UsageError
from cluster.image import engine
from cluster.launch.teardown import is_docker
from cluster.run import records
from cluster.run.folder import RunFolder
from cluster.runtime import compose
from cluster.system import memory, processes

SLOWED_SHARE = 0.2
"""How much of one core a slowed task keeps."""
SLICE_S = 0.5
PAUSE_TRIES = 5
BALLAST = ".ballast"
MAX_BALLAST_BYTES = 8 * 2**30
"""More free space than this is not a disk that somebody set aside to be filled."""

_HOG = """
import os, sys
eaten, program = [], int(sys.argv[1])
while os.path.exists(f"/proc/{program}") and len(eaten) < int(sys.argv[2]):
    eaten.append(b"x" * 2**24)
"""
"""Eats memory, 16 MiB at a time, until the program is gone: the kernel kills the largest process first."""


class Means(ABC):
    """The means to hurt one run's tasks. What can be undone is undone by `relieve`."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def processes(self, task: str) -> dict[str, dict[str, int]]:
        """Return what identifies a task's `agent` and `program`, as the task itself sees them.

        Raises:
            UsageError: the task's program has not begun.
        """
        found = records.read(self._run.programs(task), records.programs, None)
        if found is None:
            raise UsageError(f"{task} has no program yet: wait until it trains")
        return found

    @abstractmethod
    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal to the task's `program`, its `agent`, or both."""

    @abstractmethod
    def freeze(self, task: str) -> None:
        """Stop everything in the task, as a machine that hangs."""

    @abstractmethod
    def cut_off(self, task: str) -> None:
        """Take the task off the network; the disk that all share stays."""

    @abstractmethod
    def slow_down(self, task: str) -> None:
        """Leave the task a fifth of a core."""

    @abstractmethod
    def exhaust_memory(self, task: str) -> None:
        """Have no memory left for the task's program."""

    def check_disk(self) -> None:
        """Check that the disk that holds the run may be filled.

        Raises:
            UsageError: it is not one that was set aside for this.
        """
        runs = self._run.path.parent
        free = os.statvfs(runs)
        free_bytes = free.f_bavail * free.f_frsize
        if runs.stat().st_dev == Path("/").stat().st_dev or free_bytes > MAX_BALLAST_BYTES:
            raise UsageError(
                f"diskfull would fill {free_bytes / 2**30:.0f} GiB that other programs use; put RUNS_DIR on a small "
                "disk of its own (mount -t tmpfs -o size=1g tmpfs DIR) and start the run there"
            )

    def fill_disk(self) -> None:
        """Fill the disk that holds the run, if `check_disk` has nothing against it."""
        self.check_disk()
        with (self._run.path.parent / BALLAST).open("wb", buffering=0) as ballast:
            for size_bytes in (2**24, 2**12, 1):
                with contextlib.suppress(OSError):  # no room for a block of this size
                    while True:
                        ballast.write(bytes(size_bytes))

    def relieve(self, task: str) -> None:  # noqa: ARG002  # the disk is everybody's
        """Undo what was done to a task and still lasts."""
        (self._run.path.parent / BALLAST).unlink(missing_ok=True)


class LocalMeans(Means):
    """Means against local processes."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._frozen: list[dict[str, int]] = []
        self._relieved = threading.Event()
        self._slowing: threading.Thread | None = None

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal."""
        found = self.processes(task)
        for which in whose:
            processes.kill(found[which], number)

    def freeze(self, task: str) -> None:
        """Stop the agent first: it would end a program that it sees frozen."""
        self._frozen = [self.processes(task)[which] for which in ("agent", "program")]
        for process in self._frozen:
            processes.kill(process, signal.SIGSTOP)

    def cut_off(self, task: str) -> None:
        """Refuse: all local tasks share one network, their own or the machine's."""
        raise UsageError(f"partition {task}: local tasks share one network; use a run of --runtime docker")

    def slow_down(self, task: str) -> None:
        """Stop the program again and again."""
        self._relieved.clear()
        self._slowing = threading.Thread(target=self._slow, args=(self.processes(task)["program"],), daemon=True)
        self._slowing.start()

    def _slow(self, program: dict[str, int]) -> None:
        while not self._relieved.wait(SLICE_S * SLOWED_SHARE):
            processes.kill(program, signal.SIGSTOP)
            self._relieved.wait(SLICE_S * (1 - SLOWED_SHARE))
            processes.kill(program, signal.SIGCONT)

    def exhaust_memory(self, task: str) -> None:
        """Allow the program no more memory than it has: its next allocation fails."""
        program = self.processes(task)["program"]["pid"]
        pages = int(Path(f"/proc/{program}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(program, resource.RLIMIT_AS, (size, size))

    def relieve(self, task: str) -> None:
        """Undo what lasts."""
        self._relieved.set()
        if self._slowing:
            self._slowing.join()
            self._slowing = None
        while self._frozen:  # the program first: its agent would take it for frozen by itself
            processes.kill(self._frozen.pop(), signal.SIGCONT)
        super().relieve(task)


class ContainerMeans(Means):
    """Means against containers: those of the engine."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._undo: list[tuple[str, ...]] = []

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal inside the container: `docker kill` would count as a stop by hand, and nothing come back."""
        found = self.processes(task)
        words = " ".join(str(int(found[which]["pid"])) for which in whose)  # the task's own word, for a shell
        # Where the agent dies, so does the container, and this command with it.
        engine.ask("exec", self._container(task), "sh", "-c", f"kill -{number} {words}")

    def freeze(self, task: str) -> None:
        """Pause the container."""
        container = self._container(task)
        # On a busy machine with cgroup v1 runc gives up ("unable to freeze") where the next try succeeds.
        for _ in range(PAUSE_TRIES - 1):
            if engine.ask("pause", container)[0] == 0:
                break
        else:
            self._docker("pause", container)
        self._undo.append(("unpause", container))

    def cut_off(self, task: str) -> None:
        """Disconnect the container from the cluster's network."""
        container = self._container(task)
        networks = json.loads(self._docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", container))
        name = next((name for name in networks if name.endswith("_cluster")), None)
        if name is None:
            raise ClusterError(f"{task} is off the cluster's network already")
        self._docker("network", "disconnect", "--force", name, container)
        self._undo.append(("network", "connect", "--alias", task, name, container))

    def slow_down(self, task: str) -> None:
        """Limit the container's share of the processor."""
        container = self._container(task)
        self._docker("update", "--cpus", str(SLOWED_SHARE), container)
        self._undo.append(("update", "--cpus", str(os.cpu_count() or 1), container))

    def exhaust_memory(self, task: str) -> None:
        """Leave the container hardly more memory than it uses, and have another process in it eat that."""
        container, program = self._container(task), self.processes(task)["program"]["pid"]
        # cgroup v2's file, else v1's.
        files = "/sys/fs/cgroup/memory.current /sys/fs/cgroup/memory/memory.usage_in_bytes"
        used = int(self._docker("exec", container, "sh", "-c", f"cat {files} 2>/dev/null | head -n 1"))
        had = int(self._docker("inspect", "--format", "{{.HostConfig.Memory}}", container))
        limit = used + 2**27
        self._docker("update", "--memory", str(limit), "--memory-swap", str(limit), container)
        before = str(had or memory.available_bytes() + limit)  # the engine takes no limit back
        self._undo.append(("update", "--memory", before, "--memory-swap", before, container))
        # Killed or not, what counts is the program's end.
        engine.ask("exec", container, "python", "-c", _HOG, str(program), str(limit // 2**24 + 16), timeout_s=60)

    def relieve(self, task: str) -> None:
        """Undo what lasts, the last first."""
        while self._undo:
            engine.ask(*self._undo.pop())
        super().relieve(task)

    def _container(self, task: str) -> str:
        labels = (f"com.docker.compose.project={compose.project(self._run.path)}", f"tf-cluster.task={task}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        found = self._docker("ps", "--quiet", *filters)
        if not found:
            raise ClusterError(f"{task} has no container that runs; `docker ps --all` shows those that do not")
        return found.split()[0]

    def _docker(self, *words: str) -> str:
        code, told = engine.ask(*words, timeout_s=30)
        if code:
            raise ClusterError(f"docker {' '.join(words[:2])}: {' '.join(told.split())}")
        return told


def means(run: RunFolder) -> Means:
    """Return the means against a run's tasks."""
    return ContainerMeans(run) if is_docker(run) else LocalMeans(run)
