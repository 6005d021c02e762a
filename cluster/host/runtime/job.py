"""What is requested of a scheduler that places tasks: Slurm, or a Docker Swarm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cluster.contract.spec import parse_count
from cluster.system.errors import UsageError

MIN_MINUTES = 5
"""The shortest time limit that leaves any time to train beside that for saving."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_WORD = re.compile(r"[A-Za-z0-9_.:,@/+-]+")
_CONSTRAINT = re.compile(r"(node|engine)\.[A-Za-z0-9_.-]+\s*[!=]=\s*[A-Za-z0-9_.:/-]+")


@dataclass(frozen=True)
class Job:
    """What is requested of a scheduler, as typed; empty leaves it to that.

    Attributes:
        partition: of Slurm, or several, separated by commas; of a Swarm the nodes with a label of that value.
        time: the time limit, after which the job is queued again.
        account: that it is charged to.
        nodes: that its tasks are spread over.
        cpus_per_task: processors of each task.
        gpus_per_task: GPUs of each task; only the chief and the workers use theirs.
        constraint: on the nodes of a Swarm, in Docker's words, or several, separated by commas.
        apptainer: the image of Apptainer in which the tasks of a Slurm job run; an absolute path.
    """

    partition: str = ""
    time: str = ""
    account: str = ""
    nodes: str = ""
    cpus_per_task: str = ""
    gpus_per_task: str = ""
    constraint: str = ""
    apptainer: str = ""

    @property
    def described(self) -> str:
        """What is requested, as options."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(self).items() if value)

    def check(self) -> None:
        """Check that these are words for a scheduler, and not something else, and that the image is there.

        Raises:
            UsageError: one is not.
        """
        for option in ("partition", "account"):
            if (value := getattr(self, option)) and not _WORD.fullmatch(value):
                raise UsageError(f"--{option} {value!r}: expected a name as Slurm has it; see `sinfo` and `sacctmgr`")
        for part in self.constraint.split(",") if self.constraint else []:
            if not _CONSTRAINT.fullmatch(part.strip()):
                raise UsageError(
                    f"--constraint {part!r}: expected what `docker service create --constraint` takes, such as "
                    "node.labels.gpu==true"
                )
        if self.apptainer and not Path(self.apptainer).exists():
            raise UsageError(
                f"--apptainer {self.apptainer}: no such file; `apptainer build` makes one, see docs/guides/slurm.md"
            )
        for option in ("nodes", "cpus_per_task", "gpus_per_task"):
            if value := getattr(self, option):
                parse_count(option.replace("_", "-"), value, 1, 4096)
        if self.time and minutes(self.time) < MIN_MINUTES:
            raise UsageError(f"--time {self.time}: expected {MIN_MINUTES} minutes or more, of which saving takes 2")


EMPTY = Job()
"""Everything is left to the site."""


def minutes(text: str) -> float:
    """Return a time limit in minutes, from any of the forms that Slurm takes.

    Raises:
        UsageError: it is none.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--time {text!r}: expected minutes, hours:minutes:seconds or days-hours:minutes, such as 90 or 2-12:00"
        )
    days, *parts = (int(part) if part else None for part in match.groups())
    first, second, third = parts
    if days is not None:
        return days * 1440 + (first or 0) * 60 + (second or 0) + (third or 0) / 60
    if third is not None:
        return (first or 0) * 60 + (second or 0) + third / 60
    return (first or 0) + (second or 0) / 60
