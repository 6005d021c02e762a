"""Faults that are injected into a running task from outside: into its processes, network, memory or disk.

The base class has the faults that all runtimes share. Each runtime's module has a subclass, which refuses the kinds of
fault that it cannot inject.
"""

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from cluster.contract.recovery.checkpoint_files import list_finished
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Programs
from cluster.contract.schema import dictionary
from cluster.system.errors import ClusterError, UsageError
from cluster.system.files import open_file

SLOWED_SHARE = 0.2
"""Share of one core that a slowed task keeps."""
BALLAST = ".ballast"
MAX_BALLAST_BYTES = 8 * 2**30
"""A disk with more free space than this is not dedicated to being filled."""


class FaultInjector(ABC):
    """Injects faults into the tasks of one run, each kind by the method of that name; `undo` ends lasting faults.

    Attributes:
        storm: the kinds that a run on this runtime survives, from which a storm draws.
        refusals: the kinds that cannot be injected on this runtime, with the reason.
    """

    storm: frozenset[str] = frozenset({"kill", "pause", "slow", "corrupt"})
    refusals: Mapping[str, str] = MappingProxyType({})

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._frozen: set[str] = set()
        """The tasks that `pause` has stopped."""

    def check(self, kind: str, task: str) -> None:
        """Check that a kind of fault can be injected into a task, even before its program starts."""
        if kind in self.refusals or not hasattr(self, kind):
            raise UsageError(f"{kind} {task}: {self.refusals.get(kind, 'what runs the tasks cannot inject it')}")
        if kind == "diskfull":
            self._check_disk()
        if kind == "flip" and not self._run.load_cluster().copies_weights:
            raise UsageError(f"flip {task}: no other replica has a copy of its weights; use a cluster of several")

    def inject(self, kind: str, task: str, *, whole: bool = False) -> None:
        """Inject a fault that `check` allows; with `whole`, kill the task's agent as well."""
        getattr(self, kind)(task, *(["agent"] if whole else []))

    def processes(self, task: str) -> dict[str, dict[str, int]]:
        """Return the identities of a task's `agent` and `program`, in the task's own process namespace."""
        identities = records.read_record(self._run.programs(task), dictionary(Programs), None)
        if identities is None:
            raise UsageError(f"{task} has no program yet: wait until it trains")
        return identities

    @abstractmethod
    def signal(self, task: str, number: int, *whose: str) -> None:
        """Send a signal to the task's `program`, its `agent`, or both."""

    def kill(self, task: str, *more: str) -> None:
        """Kill the task's program, and the other processes named in `more`."""
        self.signal(task, signal.SIGKILL, *more, "program")

    def pause(self, task: str) -> None:
        """Stop the whole task, the agent first: a running agent would end the frozen program."""
        self._frozen.add(task)
        self.signal(task, signal.SIGSTOP, "agent", "program")

    def stop(self, task: str) -> None:
        """Ask the task to end, like a machine that is being shut down."""
        self.signal(task, signal.SIGTERM, "agent")

    def corrupt(self, task: str) -> None:
        """Cut off the last byte of the newest checkpoint's largest file, like a faulty disk, and kill the program."""
        for newest in list_finished(self._run.checkpoints)[:1]:
            name = max(newest.files, key=lambda name: newest.files[name][0])
            with open_file(newest.folder / Path(name).name, "r+b") as file:
                file.truncate(file.seek(0, 2) - 1)
        self.kill(task)

    def flip(self, task: str) -> None:
        """Flip a bit of the task's weights or optimizer variables, like a faulty memory module."""
        self._run.flip_request(task).touch()

    def diskfull(self, task: str) -> None:  # noqa: ARG002  # the disk is shared
        """Fill the disk of the run folder, if `check` allows it."""
        self._check_disk()
        with (self._run.path.parent / BALLAST).open("wb", buffering=0) as ballast:
            for size_bytes in (2**24, 2**12, 1):
                with contextlib.suppress(OSError):  # no room for a block of this size
                    while True:
                        ballast.write(bytes(size_bytes))

    def _check_disk(self) -> None:
        runs = self._run.path.parent
        free = os.statvfs(runs)
        free_bytes = free.f_bavail * free.f_frsize
        if runs.stat().st_dev == Path("/").stat().st_dev or free_bytes > MAX_BALLAST_BYTES:
            raise UsageError(
                f"diskfull would fill {free_bytes / 2**30:.0f} GiB that other programs use; put RUNS_DIR on a "
                "small separate disk (mount -t tmpfs -o size=1g tmpfs DIR) and start the run there"
            )

    def undo(self, task: str) -> None:
        """Undo the lasting faults of a task."""
        if task in self._frozen:
            self._frozen.discard(task)
            with contextlib.suppress(ClusterError):  # the program first, or its agent would find it frozen
                self.signal(task, signal.SIGCONT, "program", "agent")
        (self._run.path.parent / BALLAST).unlink(missing_ok=True)
        self._run.flip_request(task).unlink(missing_ok=True)  # otherwise a resumed run would flip a bit
