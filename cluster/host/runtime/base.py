"""The one protocol behind which tasks run, whatever runs them.

A runtime is a subclass of `Runtime` in its own module and a line in `registry.py`. Nothing outside this package asks
which one it is: what differs between runtimes is a method or an attribute here.

A runtime does not stop a run gracefully. It needs no way to: every task's agent reads the request in the run folder,
which all tasks share.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.contract import user_code
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec
from cluster.host.gpu.placement import Placement
from cluster.host.image.engine import Availability
from cluster.host.runtime import resources
from cluster.host.runtime.injector import FaultInjector
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import Job, Memory, Network
from cluster.system.errors import PrerequisiteError, UsageError

Shell = Callable[[str], object]
"""Runs a shell command and shows it; raises where it fails."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of the doctor."""

    check: str
    state: str
    """`ok`, `warning` (it works, but not as well as it could) or `failed`."""
    detail: str
    fix: str = ""

    @property
    def row(self) -> tuple[str, str, str]:
        """The row of a table: state, check, and the detail with its fix."""
        return self.state, self.check, "; ".join(filter(None, (self.detail, self.fix)))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a runtime runs: the tasks of a run, and what they need."""

    run: RunFolder
    cluster: ClusterSpec
    data_dir: Path
    payload: Payload
    gpus: Placement
    memory: Memory
    network: Network
    job: Job = field(default_factory=Job)
    elastic: Mapping[str, Any] = field(default_factory=dict)
    """How many workers it may lose, as in `started.json`; empty if it needs all of them."""
    keep_s: float = 0.0
    """How long a process that has imported TensorFlow stays for the next run."""

    @property
    def accelerator(self) -> str:
        """Which image the tasks need: all the same, so that all compute with one TensorFlow."""
        return "gpu" if self.job.gpus_per_task or self.gpus.ids else "cpu"


class Runtime(ABC):
    """Where the tasks of runs are: how they are described, started, found, disturbed and ended.

    Attributes:
        name: on the command line and in records.
        tasks: what its tasks are, as in "3 tasks as containers".
        automatic: whether `--runtime auto` may choose it.
        reaches_hardware: whether its tasks can use this machine's TPU.
        limits_memory: whether `--memory` limits its tasks.
        python: the version of Python that its tasks run with, for which the user's packages are installed.
        is_remote: whether its tasks run on machines that a scheduler chooses, with their own GPUs.
        job_options: what can be requested of that scheduler, fields of `Job`.
        board: what runs TensorBoard next to it, `tensorboard.PROCESS` or `CONTAINER`.
        injector: what injects faults into its tasks.
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
        """Return whether it can be used on this machine. Bounded in time, and starts nothing."""

    def examine(self) -> list[Finding]:
        """Return its findings for `invoke doctor`."""
        return []

    # Planning: nothing is changed

    def memory(self, requested: str, num_tasks: int) -> Memory:  # noqa: ARG002
        """Return the memory of each task for `--memory`, a valid amount or empty; by default without a limit."""
        return Memory(requested)

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:  # noqa: ARG002
        """Return the network of the tasks; by default a private one, without a choice.

        Args:
            requested: `--network`; empty where it was left out.
            previous: what was requested when the run began, for one that is resumed.
            way_out: what the tasks must reach outside of this machine, in words; empty where that is nothing.
            serves: whether TensorFlow's servers run.
        """
        resources.check_network(requested)
        if requested == resources.HOST:
            raise UsageError(
                f"--network {requested} with {self.tasks}: theirs is their own; add --runtime local, or leave it out"
            )
        return Network(resources.PRIVATE, requested or previous)

    def ports(self, num_tasks: int) -> tuple[int, ...] | None:  # noqa: ARG002
        """Return a free port of 127.0.0.1 for each task; None where every task has its own host name."""
        return None

    def seen(self, payload: Payload) -> Payload:
        """Return a payload with the paths at which tasks see what it names."""
        return payload

    @abstractmethod
    def render(self, work: Workload) -> dict[str, Any]:
        """Return the run's `compose.json`: everything that `start` needs. `runtime` or `x-runtime` in it is `name`.

        Raises:
            PrerequisiteError: the tasks could not read what they need, or could read what they must not.
        """

    # Starting

    @abstractmethod
    def preflight(self, work: Workload, ending: int = 0) -> None:
        """Check that the machine hands out the GPUs and has the memory, with that of `ending` tasks that end before."""

    def prepare(self, work: Workload, sh: Shell, *, renew: bool = True) -> None:  # noqa: B027
        """Make what tasks run in, such as images: with `renew` again where this checkout has changed."""

    def image(self, work: Workload) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the record of the tasks' image in the manifest; None without an image."""
        return None

    @abstractmethod
    def commands(self, work: Workload) -> list[str]:
        """Return the commands of `prepare` and `start`, to be shown or pasted once the run folder exists."""

    def anticipate(self, work: Workload, compose: Mapping[str, Any], config: Mapping[str, Any]) -> None:  # noqa: B027
        """Begin what takes long, before the run's folder exists; it ends with this process unless `start` follows."""

    @property
    def program_starter(self) -> user_code.Start | None:
        """What starts programs that call the user's code after what was anticipated; None without that."""
        return None

    @abstractmethod
    def start(self, work: Workload, sh: Shell) -> None:
        """Start every task, and return at once when that has begun.

        `owner.create_owner` records it first, so that what a failed start leaves behind is found.
        """

    # A run that was started

    @abstractmethod
    def alive(self, run: RunFolder) -> bool:
        """Whether anything of the run that was started still runs."""

    def scheduler_status(self, run: RunFolder) -> str:  # noqa: ARG002
        """Return a scheduler's status of a run without heartbeats, in a line; empty without a scheduler.

        It may be a few seconds old.
        """
        return ""

    @abstractmethod
    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        """End and remove everything of the run but its folder; return once that is gone.

        Whether something was there does not matter. The run's own records are not trusted: tasks can rewrite them.
        The tasks get `grace_s` to end by themselves, where a runtime can wait for them.

        Raises:
            PrerequisiteError: what runs the tasks does not answer.
            TimedOut: something does not end.
        """

    @abstractmethod
    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        """Return the runs of a folder of which anything is left.

        `names` are the runs that have records there; there may be others, whose folders are gone.

        Raises:
            PrerequisiteError: what runs the tasks does not answer, and what to do.
        """

    def faults(self, run: RunFolder) -> FaultInjector:
        """Return the injector of faults into the run's tasks."""
        return self.injector(run)


class ScheduledRuntime(Runtime):
    """A runtime whose tasks run where a scheduler places them: Slurm, or a Docker Swarm.

    A scheduler knows a run by a name, such as a job's or a stack's, and may be slow or away. So it is asked seldom, and
    never about runs that it cannot have.

    Attributes:
        look_s: how long an answer about a run is used again.
        way_back: what to do where the scheduler does not answer.
    """

    is_remote = True
    look_s: float
    way_back: str

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], tuple[float, Any]] = {}
        """When the scheduler was asked each question about each run last, and its answer."""

    def look(self, question: Callable[[RunFolder], Any], run: RunFolder) -> Any:
        """Return the answer to a question about a run; one that is younger than `look_s` is used again."""
        key, now = (question.__name__, str(run.path)), time.monotonic()
        if key not in self._answers or now - self._answers[key][0] > self.look_s:
            self._answers[key] = (now, question(run))
        return self._answers[key][1]

    @abstractmethod
    def scheduled_name(self, run: RunFolder) -> str:
        """Return the name by which the scheduler knows the run."""

    @abstractmethod
    def has_tasks(self, name: str) -> bool:
        """Return whether tasks of this name run, or are about to; raise where the scheduler does not answer."""

    @abstractmethod
    def scheduled(self) -> Collection[str]:
        """Return the names that the scheduler has anything of; raise where it does not answer."""

    def alive(self, run: RunFolder) -> bool:
        """Whether tasks of the run run, or are about to; also where the scheduler does not answer."""
        return bool(self.look(self._ask_alive, run))

    def _ask_alive(self, run: RunFolder) -> bool:
        try:
            return self.has_tasks(self.scheduled_name(run))
        except PrerequisiteError:
            return True

    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        """Return the runs that the scheduler has something of, by one question; none if no run can be one of its."""
        runs = [RunFolder(runs_dir / name) for name in names]
        # The record of a run is kept until nothing of it is left.
        ours = [run for run in runs if run.outside(owner.RECORD).exists() and recorded_runtime(run) == self.name]
        try:
            scheduled = self.scheduled() if ours else ()
        except PrerequisiteError as error:
            raise PrerequisiteError(f"{error}; {self.way_back}") from error
        return {run.name for run in ours if self.scheduled_name(run) in scheduled}


def recorded_runtime(run: RunFolder) -> str:
    """Return the name of the runtime that a run was started on; empty where its records are damaged."""
    if owned := owner.read_owner(run):
        return owned.runtime
    rendered = run.composed
    return str(rendered.get("x-runtime") or rendered.get("runtime") or "")
