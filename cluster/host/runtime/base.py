"""The interface of all runtimes, which run the tasks of a run, and of the faults that are injected from outside.

A runtime is a subclass of `Runtime` in its own module and a line in `registry.py`. Nothing outside this package checks
which runtime a run has: each difference between them is a method or an attribute here.

A runtime need not be able to stop a run gracefully: every task's agent reads stop requests in the run folder, which all
tasks share.
"""

import contextlib
import hashlib
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cluster.contract import user_code
from cluster.contract.recovery.checkpoint_files import list_finished
from cluster.contract.run import owner, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Programs
from cluster.contract.schema import dictionary
from cluster.contract.spec import ClusterSpec
from cluster.host.image.engine import Availability
from cluster.host.nvidia import Placement
from cluster.host.runtime import resources
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import Job, Memory, Network
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.files import open_file

SLOWED_SHARE = 0.2
"""Share of one core that a slowed task keeps."""
BALLAST = ".ballast"
MAX_BALLAST_BYTES = 8 * 2**30
"""A disk with more free space than this is not dedicated to being filled."""
Shell = Callable[[str], object]
"""A function that prints and runs a shell command, and raises if the command fails."""


class FaultInjector(ABC):
    """Injects faults into the tasks of one run, each kind by the method of that name; `undo` ends lasting faults.

    Attributes:
        storm: the kinds that a run on this runtime survives, from which a storm draws.
        refusals: the kinds that cannot be injected on this runtime, with the reason.
    """

    storm: frozenset[str] = frozenset({"kill", "pause", "slow", "corrupt"})
    refusals: ClassVar[Mapping[str, str]] = {}

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._frozen: set[str] = set()
        """The tasks that `pause` has stopped."""

    def check(self, kind: str, task: str) -> None:
        """Check that a kind of fault can be injected into a task, even before its program starts."""
        if kind in self.refusals or not hasattr(self, kind):
            raise UsageError(f"{kind} {task}: {self.refusals.get(kind, 'this runtime cannot inject it')}")
        if kind == "diskfull":
            self._check_disk()
        if kind == "flip" and not self._run.load_cluster().copies_weights:
            raise UsageError(f"flip {task}: no other replica has a copy of its weights; use a cluster of several")

    def inject(self, kind: str, task: str, *, whole: bool = False) -> None:
        """Inject a fault that `check` allows; with `whole`, kill the task's agent as well."""
        getattr(self, kind)(task, *(["agent"] if whole else []))

    def processes(self, task: str) -> dict[str, dict[str, int]]:
        """Return the identities of a task's `agent` and `program`, in the task's own process namespace."""
        if (identities := records.read_record(self._run.programs(task), dictionary(Programs), None)) is None:
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
            fix = "put RUNS_DIR on a small separate disk (mount -t tmpfs -o size=1g tmpfs DIR) and start the run there"
            raise UsageError(f"diskfull would fill {free_bytes / 2**30:.0f} GiB that other programs use; {fix}")

    def undo(self, task: str) -> None:
        """Undo the lasting faults of a task."""
        if task in self._frozen:
            self._frozen.discard(task)
            with contextlib.suppress(ClusterError):  # the program first, or its agent would find it frozen
                self.signal(task, signal.SIGCONT, "program", "agent")
        (self._run.path.parent / BALLAST).unlink(missing_ok=True)
        self._run.flip_request(task).unlink(missing_ok=True)  # otherwise a resumed run would flip a bit


@dataclass(frozen=True)
class Finding:
    """The result of one check by `invoke doctor`."""

    check: str
    state: str
    """`ok`, `warning` (works, but not optimally) or `failed`."""
    detail: str
    fix: str = ""

    @property
    def row(self) -> tuple[str, str, str]:
        """The row of a table: state, check, and the detail with its fix."""
        return self.state, self.check, "; ".join(filter(None, (self.detail, self.fix)))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tasks of a run and the resources that a runtime must give them."""

    run: RunFolder
    cluster: ClusterSpec
    data_dir: Path
    payload: Payload
    gpus: Placement
    memory: Memory
    network: Network
    job: Job = field(default_factory=Job)
    elastic: Mapping[str, Any] = field(default_factory=dict)
    """The options of an elastic run, as in `started.json`; empty if the run needs all workers."""
    keep_s: float = 0.0
    """How long, in seconds, a process that has imported TensorFlow is kept for the next run."""

    @property
    def accelerator(self) -> str:
        """The kind of image for the tasks: the same for all, so that all use the same build of TensorFlow."""
        return "gpu" if self.job.gpus_per_task or self.gpus.ids else "cpu"


class Runtime(ABC):
    """A way to run tasks: describes, starts, finds, disturbs and ends them.

    Attributes:
        name: the name on the command line and in records.
        tasks: the noun for its tasks, as in "3 tasks as containers".
        automatic: whether `--runtime auto` may choose it.
        reaches_hardware: whether its tasks can use this machine's TPU.
        limits_memory: whether `--memory` limits its tasks.
        python: the version of Python in its tasks, for which the user's packages are installed.
        is_remote: whether its tasks run on machines that a scheduler chooses, with their own GPUs.
        job_options: the fields of `Job` that its scheduler supports.
        board: how TensorBoard runs, `tensorboard.PROCESS` or `CONTAINER`.
        injector: the class that injects faults into its tasks.
    """

    name: str
    tasks: str
    automatic: bool = False
    reaches_hardware: bool = False
    limits_memory: bool = False
    is_remote: bool = False
    job_options: frozenset[str] = frozenset()
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    board: str = "local"
    injector: type[FaultInjector]

    @abstractmethod
    def probe(self) -> Availability:
        """Return whether the runtime can be used on this machine. Has a timeout, and starts nothing."""

    def examine(self) -> list[Finding]:
        """Return the runtime's findings for `invoke doctor`."""
        return []

    # Planning: nothing is changed

    def memory(self, requested: str, num_tasks: int) -> Memory:  # noqa: ARG002
        """Return the memory of each task for `--memory`, which is valid or empty; by default without a limit."""
        return Memory(requested)

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:  # noqa: ARG002
        """Return the network of the tasks; by default a private one, without a choice.

        Args:
            requested: the value of `--network`; empty if it was left out.
            previous: the value when a resumed or repeated run began.
            way_out: a description of what the tasks must reach outside this machine; empty for nothing.
            serves: whether the tasks run TensorFlow servers.
        """
        resources.check_network(requested)
        if requested == resources.HOST:
            raise UsageError(f"--network {requested}: {self.tasks} always have a private network; leave it out")
        return Network(resources.PRIVATE, requested or previous)

    def ports(self, num_tasks: int) -> tuple[int, ...] | None:  # noqa: ARG002
        """Return a free port of 127.0.0.1 for each task; None if every task has its own host name."""
        return None

    def seen(self, payload: Payload) -> Payload:
        """Return a payload with its paths as seen by the tasks."""
        return payload

    @abstractmethod
    def render(self, work: Workload) -> dict[str, Any]:
        """Return the run's `compose.json`: everything that `start` needs. `runtime` or `x-runtime` in it is `name`.

        Raises an error if tasks could not read the files that they need, or could read files that they must not.
        """

    # Starting

    @abstractmethod
    def preflight(self, work: Workload, ending: int = 0) -> None:
        """Check that the machine can provide the GPUs and the memory; `ending` tasks will free theirs first."""

    def prepare(self, work: Workload, sh: Shell, *, renew: bool = True) -> None:  # noqa: B027
        """Create the tasks' environment, such as images; with `renew`, recreate it if this checkout has changed."""

    def image(self, work: Workload) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the record of the tasks' image in the manifest; None without an image."""
        return None

    @abstractmethod
    def commands(self, work: Workload) -> list[str]:
        """Return the commands of `prepare` and `start`, to show, or to paste once the run folder exists."""

    def anticipate(self, work: Workload, compose: Mapping[str, Any], config: Mapping[str, Any]) -> None:  # noqa: B027
        """Begin slow work before the run folder exists; it ends with this process unless `start` follows."""

    @property
    def program_starter(self) -> user_code.Start | None:
        """The factory of processes that call the user's code, which `anticipate` provides; None without one."""
        return None

    @abstractmethod
    def start(self, work: Workload, sh: Shell) -> None:
        """Start every task without waiting for agents, after `owner.create_owner`, so that leftovers are found."""

    # A run that was started

    @abstractmethod
    def alive(self, run: RunFolder) -> bool:
        """Whether any process or container of the run still runs."""

    def scheduler_status(self, run: RunFolder) -> str:  # noqa: ARG002
        """Return the status, maybe seconds old, of a run without heartbeats, as a line; empty without a scheduler."""
        return ""

    def cancel_queued(self, run: RunFolder) -> bool:  # noqa: ARG002
        """Cancel a run unless its scheduler has already begun a task; return whether it was cancelled."""
        return False

    @abstractmethod
    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        """End and remove everything of the run except its folder; return once all is gone. Idempotent.

        Must not trust the run's own records, which tasks can rewrite. The tasks get `grace_s` to end by themselves if
        the runtime can wait for them. Raises an error if the scheduler does not answer, or a process does not end.
        """

    @abstractmethod
    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        """Return the names of the runs of a folder that have left processes, containers or networks.

        `names` are the runs that have records there; there may be others, whose folders are gone. Raises
        PrerequisiteError if the engine or scheduler does not answer.
        """


class ScheduledRuntime(Runtime):
    """A runtime whose tasks run where a scheduler places them: Slurm, or a Docker Swarm.

    A scheduler knows a run by a name, such as a job's or a stack's, and may be slow or unavailable. So it is queried
    rarely, and never about runs that it cannot have.

    Attributes:
        look_s: how long, in seconds, a scheduler's answer about a run is cached.
        way_back: advice for a scheduler that does not answer.
    """

    is_remote = True
    look_s: float
    way_back: str

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], tuple[float, Any]] = {}
        """Cache of the scheduler's answers, with their times, by question and run."""

    def look(self, question: Callable[[RunFolder], Any], run: RunFolder) -> Any:
        """Return the answer to a question about a run, cached for `look_s`."""
        key, now = (question.__name__, str(run.path)), time.monotonic()
        if key not in self._answers or now - self._answers[key][0] > self.look_s:
            self._answers[key] = (now, question(run))
        return self._answers[key][1]

    @abstractmethod
    def scheduled_name(self, run: RunFolder) -> str:
        """Return the scheduler's name for the run."""

    @abstractmethod
    def has_tasks(self, name: str) -> bool:
        """Return whether tasks of this name are running or queued; raise if the scheduler does not answer."""

    @abstractmethod
    def scheduled(self) -> Collection[str]:
        """Return the names of everything that the scheduler has; raise if it does not answer."""

    def alive(self, run: RunFolder) -> bool:
        """Whether the run's tasks are running or queued; True if the scheduler does not answer."""
        return bool(self.look(self._ask_alive, run))

    def _ask_alive(self, run: RunFolder) -> bool:
        try:
            return self.has_tasks(self.scheduled_name(run))
        except PrerequisiteError:
            return True

    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        """Return the names of the runs that the scheduler still has, with one query, or none if no run can be there."""
        runs = [RunFolder(runs_dir / name) for name in names]
        # The owner record of a run is kept until nothing is left of the run.
        ours = [run for run in runs if run.outside(owner.RECORD).exists() and recorded_runtime(run) == self.name]
        try:
            scheduled = self.scheduled() if ours else ()
        except PrerequisiteError as error:
            raise PrerequisiteError(f"{error}; {self.way_back}") from error
        return {run.name for run in ours if self.scheduled_name(run) in scheduled}


def path_digest(path: Path) -> str:
    """Return eight characters that distinguish an engine's or scheduler's names for the same name in other folders."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]


def recorded_runtime(run: RunFolder) -> str:
    """Return the name of the runtime on which a run was started; empty if its records are damaged."""
    if owned := owner.read_owner(run):
        return owned.runtime
    rendered = run.composed
    return str(rendered.get("x-runtime") or rendered.get("runtime") or "")
