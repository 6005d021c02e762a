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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from cluster.errors import ClusterError, UsageError
from cluster.image import engine
from cluster.run import records
from cluster.run.folder import RunFolder
from cluster.runtime import overlay
from cluster.system import memory, processes
from cluster.system.files import open_file

SLOWED_SHARE = 0.2
"""How much of one core a slowed task keeps."""
SLICE_S = 0.5
PAUSE_TRIES = 5
SRUN_S = 60.0
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


class FaultInjector(ABC):
    """Injects faults into the tasks of one run, each kind by the method of its name; `undo` ends what lasts.

    Attributes:
        storm: the kinds that a run outlives here, so that a storm may draw them.
        refusals: why a kind cannot be injected here.
    """

    storm: frozenset[str] = frozenset({"kill", "pause", "slow", "corrupt"})
    refusals: Mapping[str, str] = MappingProxyType({})

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def check(self, kind: str, task: str) -> None:
        """Check that a kind of fault can be injected into a task, whether or not its program has begun.

        Raises:
            UsageError: it cannot.
        """
        if kind in self.refusals or not hasattr(self, kind):
            raise UsageError(f"{kind} {task}: {self.refusals.get(kind, 'what runs the tasks cannot inject it')}")
        if kind == "diskfull":
            self._check_disk()

    def inject(self, kind: str, task: str, *, whole: bool = False) -> None:
        """Inject a fault.

        Args:
            kind: of fault, which `check` allows.
            task: the task.
            whole: for `kill`: the task's agent too.

        Raises:
            UsageError: the task's program has not begun.
            ClusterError: the engine refuses.
        """
        getattr(self, kind)(task, *(["agent"] if whole else []))

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

    def kill(self, task: str, *more: str) -> None:
        """Kill the task's program, and whatever is named besides."""
        self.signal(task, signal.SIGKILL, *more, "program")

    def stop(self, task: str) -> None:
        """Ask the task to end, as a machine that is shut down."""
        self.signal(task, signal.SIGTERM, "agent")

    def corrupt(self, task: str) -> None:
        """Cut off the last byte of the newest checkpoint, as a disk that lies does, and kill the program."""
        if saved := self._run.saved_steps:
            record = records.read(self._run.checkpoints / f"ckpt-{saved[-1]}.json", records.checkpoint)
            name = max(record["files"].items(), key=lambda entry: entry[1]["size_bytes"])[0]
            with open_file(self._run.checkpoints / Path(name).name, "r+b") as file:
                file.truncate(file.seek(0, 2) - 1)
        self.kill(task)

    def diskfull(self, task: str) -> None:  # noqa: ARG002  # the disk is everybody's
        """Fill the disk that holds the run, if `check` has nothing against it."""
        self._check_disk()
        with (self._run.path.parent / BALLAST).open("wb", buffering=0) as ballast:
            for size_bytes in (2**24, 2**12, 1):
                with contextlib.suppress(OSError):  # no room for a block of this size
                    while True:
                        ballast.write(bytes(size_bytes))

    def _check_disk(self) -> None:
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

    def undo(self, task: str) -> None:  # noqa: ARG002  # the disk is everybody's
        """Undo what was done to a task and still lasts."""
        (self._run.path.parent / BALLAST).unlink(missing_ok=True)


class ProcessFaults(FaultInjector):
    """Disturbs local processes, by signals and limits."""

    refusals = MappingProxyType({"partition": "local tasks share one network; use a run of --runtime docker"})

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._frozen: list[dict[str, int]] = []
        self._undone = threading.Event()
        self._slowing: threading.Thread | None = None

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal."""
        found = self.processes(task)
        for which in whose:
            processes.kill(found[which], number)

    def pause(self, task: str) -> None:
        """Stop the agent first: it would end a program that it sees frozen."""
        self._frozen = [self.processes(task)[which] for which in ("agent", "program")]
        for process in self._frozen:
            processes.kill(process, signal.SIGSTOP)

    def slow(self, task: str) -> None:
        """Stop the program again and again."""
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
        program = self.processes(task)["program"]["pid"]
        pages = int(Path(f"/proc/{program}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(program, resource.RLIMIT_AS, (size, size))

    def undo(self, task: str) -> None:
        """Undo what lasts."""
        self._undone.set()
        if self._slowing:
            self._slowing.join()
            self._slowing = None
        while self._frozen:  # the program first: its agent would take it for frozen by itself
            processes.kill(self._frozen.pop(), signal.SIGCONT)
        super().undo(task)


class SlurmFaults(FaultInjector):
    """Disturbs the tasks of a job, by signals on their nodes."""

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
        job, node = self._job(), self._node(task)
        step = ["srun", f"--jobid={job}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
        code, _, complained = processes.run([*step, "kill", f"-{number}", *words], SRUN_S)
        if code:
            raise ClusterError(
                f"srun on {node or 'a node'} of job {job or 'none'}: {' '.join(complained.split())[:200]}"
            )

    def _node(self, task: str) -> str:
        attempts = sorted((self._run.control / "slurm").glob(f"*/{task}.json"), key=lambda path: path.stat().st_mtime)
        return records.read(attempts[-1], records.place)["node"] if attempts else ""

    def pause(self, task: str) -> None:
        """Stop the agent first: it would end a program that it sees frozen."""
        self._frozen.add(task)
        self.signal(task, signal.SIGSTOP, "agent", "program")

    def undo(self, task: str) -> None:
        """Undo what lasts; the program may have been ended meanwhile."""
        if task in self._frozen:
            self._frozen.discard(task)
            with contextlib.suppress(ClusterError):
                self.signal(task, signal.SIGCONT, "program", "agent")
        super().undo(task)


class ContainerFaults(FaultInjector):
    """Disturbs containers, by the engine."""

    storm = FaultInjector.storm | {"partition", "oom"}

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._undo: list[tuple[str, ...]] = []

    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal inside the container: `docker kill` would count as a stop by hand, and nothing come back."""
        found = self.processes(task)
        words = " ".join(str(int(found[which]["pid"])) for which in whose)  # the task's own word, for a shell
        # Where the agent dies, so does the container, and this command with it.
        engine.ask("exec", self._container(task), "sh", "-c", f"kill -{number} {words}")

    def pause(self, task: str) -> None:
        """Pause the container."""
        container = self._container(task)
        # On a busy machine with cgroup v1 runc gives up ("unable to freeze") where the next try succeeds.
        for _ in range(PAUSE_TRIES - 1):
            if engine.ask("pause", container)[0] == 0:
                break
        else:
            self._docker("pause", container)
        self._undo.append(("unpause", container))

    def partition(self, task: str) -> None:
        """Disconnect the container from the cluster's network."""
        container = self._container(task)
        networks = json.loads(self._docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", container))
        name = next((name for name in networks if name.endswith("_cluster")), None)
        if name is None:
            raise ClusterError(f"{task} is off the cluster's network already")
        self._docker("network", "disconnect", "--force", name, container)
        self._undo.append(("network", "connect", "--alias", task, name, container))

    def slow(self, task: str) -> None:
        """Limit the container's share of the processor."""
        container = self._container(task)
        self._docker("update", "--cpus", str(SLOWED_SHARE), container)
        self._undo.append(("update", "--cpus", str(os.cpu_count() or 1), container))

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
        self._undo.append(("update", "--memory", before, "--memory-swap", before, container))
        # Killed or not, what counts is the program's end.
        engine.ask("exec", container, "python", "-c", _HOG, str(program), str(limit // 2**24 + 16), timeout_s=60)

    def undo(self, task: str) -> None:
        """Undo what lasts, the last first."""
        while self._undo:
            engine.ask(*self._undo.pop())
        super().undo(task)

    def _container(self, task: str) -> str:
        labels = (f"com.docker.compose.project={overlay.project(self._run.path)}", f"tf-cluster.task={task}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        found = self._docker("ps", "--quiet", *filters)
        if not found:
            raise ClusterError(f"{task} has no container that runs; `docker ps --all` shows those that do not")
        return found.split()[0]

    def _docker(self, *words: str) -> str:
        code, output = engine.ask(*words, timeout_s=30)
        if code:
            raise ClusterError(f"docker {' '.join(words[:2])}: {' '.join(output.split())}")
        return output
