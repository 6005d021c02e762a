"""The resources of a run's tasks: memory, network, and the request to a scheduler.

Memory: without `--memory`, containers share nine tenths of the engine's memory evenly, which leaves room for the engine
and its callers. Swap is off: a task that swaps would slow down all tasks that wait for it.

Network: TensorFlow's servers listen on every interface without a password, and TensorFlow has no option to change that.
So local tasks get a private network if the machine allows one; otherwise the user gets a warning.
"""

import re
from dataclasses import dataclass

from cluster.system import memory
from cluster.system.errors import PrerequisiteError, UsageError, nearest
from cluster.system.messages import counted, size

TASK_MEMORY_BYTES = 600 * 2**20
"""The memory of a TensorFlow process before training."""
SHARED = 0.9
"""The share of the machine's memory that the tasks of a run divide among themselves."""
UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40}
PRIVATE, HOST, ENCRYPTED, EGRESS = "private", "host", "encrypted", "egress"
UNPROTECTED = "warning: TensorFlow's servers have no authentication, and"
EXPOSED = f"{UNPROTECTED} all who reach this machine reach them"


@dataclass(frozen=True)
class Memory:
    """The memory of a run's tasks."""

    requested: str = ""
    """`--memory` as typed; empty for an equal share."""
    task_bytes: int = 0
    """The limit of each task; 0 for local processes, which have no limit."""
    total_bytes: int = 0
    """The memory of the engine's machine."""

    def check(self, num_tasks: int) -> None:
        """Check that the tasks fit; raise PrerequisiteError if not."""
        if self.requested and num_tasks * self.task_bytes > self.total_bytes:
            needed, total = size(num_tasks * self.task_bytes), size(self.total_bytes)
            use = f"use --memory {self.total_bytes // num_tasks // 2**20}MiB, or fewer tasks"
            option = f"--memory {self.requested} for {counted(num_tasks, 'task')}"
            raise PrerequisiteError(f"{option} makes {needed}, the engine's machine has {total}; {use}")
        if self.task_bytes < TASK_MEMORY_BYTES:
            shared = int(self.total_bytes * SHARED)
            have = f"{counted(num_tasks, 'task')} that share {size(shared)} of memory get {size(self.task_bytes)} each"
            use = f"use at most {counted(shared // TASK_MEMORY_BYTES, 'task')} here"
            raise PrerequisiteError(f"{have}, and TensorFlow alone takes {size(TASK_MEMORY_BYTES)}; {use}")


def check_free_memory(num_tasks: int, ending: int = 0) -> None:
    """Check that TensorFlow processes without a limit fit into the free memory and that of `ending` tasks."""
    available = memory.free_bytes() + ending * TASK_MEMORY_BYTES
    if num_tasks * TASK_MEMORY_BYTES > available:
        need = f"{counted(num_tasks, 'task')} need about {num_tasks * TASK_MEMORY_BYTES / 2**30:.1f} GiB of memory"
        use = f"use at most {counted(available // TASK_MEMORY_BYTES, 'task')} here"
        raise PrerequisiteError(f"{need}, {available / 2**30:.1f} GiB are free; {use}")


def parse_memory(text: str) -> int:
    """Return a memory limit in bytes; 0 for an empty text."""
    if not text:
        return 0
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(MiB|GiB|TiB)", text, re.IGNORECASE | re.ASCII)
    if not match:
        raise UsageError(f"--memory {text!r}: expected a number and MiB, GiB or TiB, such as 8GiB or 1500MiB")
    size_bytes = int(float(match[1]) * UNITS[match[2].lower()])
    if size_bytes < TASK_MEMORY_BYTES:
        least = f"at least {TASK_MEMORY_BYTES // 2**20}MiB, what TensorFlow alone takes"
        raise UsageError(f"--memory {text!r}: expected {least}, and at most the machine's, such as 8GiB or 1500MiB")
    return size_bytes


@dataclass(frozen=True)
class Network:
    """The network of a run's tasks."""

    name: str = PRIVATE
    """`private`: only for the tasks; `encrypted`: private over several hosts; `egress`: private, with access to other
    networks; `host`: this machine's network."""
    requested: str = ""
    """`--network` as typed, for a resumed run."""
    warning: str = ""
    """A warning about who can reach the tasks, and why; empty if nobody can."""


def check_network(requested: str, *allowed: str) -> None:
    """Check the value of `--network` against the allowed networks, by default those of local processes."""
    known = allowed or (PRIVATE, HOST)
    if requested and requested not in known:
        raise UsageError(f"--network {requested!r} is not a network here{nearest(requested, known)}")


@dataclass(frozen=True)
class Job:
    """The request to a scheduler, as typed; an empty field leaves the choice to the scheduler.

    Attributes:
        partition: one or more Slurm partitions, separated by commas.
        time: the time limit, after which the job is queued again.
        gpus_per_task: the number of GPUs of each task; only the chief and the workers use theirs.
        constraint: one or more constraints on a Swarm's nodes, in Docker's syntax, separated by commas.
    """

    partition: str = ""
    time: str = ""
    account: str = ""
    nodes: str = ""
    cpus_per_task: str = ""
    gpus_per_task: str = ""
    constraint: str = ""
