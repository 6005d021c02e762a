"""A run as a Slurm job: what is requested of Slurm, and the batch script, with a Slurm task for each of ours."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UsageError
from cluster.paths import ROOT
from cluster.spec import ClusterSpec, parse_count

SAVE_S = 120
"""How long before the end of its time a job begins to save: longer than any task takes to save and end."""
MIN_MINUTES = 5
"""The shortest time limit that leaves any time to train beside that."""
LEAVE_S = 60
"""How long the other tasks get once the first has ended, before Slurm ends them."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_WORD = re.compile(r"[A-Za-z0-9_.:,@/+-]+")


@dataclass(frozen=True)
class Job:
    """What is requested of Slurm, as typed; empty leaves it to the site.

    Attributes:
        partition: or several, separated by commas.
        time: the time limit, after which the job is queued again.
        account: that it is charged to.
        nodes: that its tasks are spread over.
        cpus_per_task: processors of each task.
        gpus_per_task: GPUs of each task; only the chief and the workers use theirs.
    """

    partition: str = ""
    time: str = ""
    account: str = ""
    nodes: str = ""
    cpus_per_task: str = ""
    gpus_per_task: str = ""

    def check(self) -> None:
        """Check that these are words for Slurm, and not something else.

        Raises:
            UsageError: one is not.
        """
        for option in ("partition", "account"):
            if (value := getattr(self, option)) and not _WORD.fullmatch(value):
                raise UsageError(f"--{option} {value!r}: expected a name as Slurm has it; see `sinfo` and `sacctmgr`")
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


def script(
    spec: ClusterSpec,
    name: str,
    run_dir: Path,
    job: Job,
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> str:
    """Return the batch script of a run.

    Args:
        spec: the cluster; where its tasks will be is not known yet.
        name: of the job.
        run_dir: the run's folder, which every node sees under this name.
        job: what is requested of Slurm.
        environment: what every task gets.
        arguments: of the agents; empty for the built-in trainer.
    """
    agent = shlex.join([sys.executable, "-m", "cluster.agent.schedulers.slurm"])
    words = " ".join(shlex.quote(word) for word in arguments)
    exported = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items()))
    return f"""#!/bin/bash
{_directives(spec, name, run_dir, job)}

{exported}

trap {shlex.quote(f"{agent} stop")} USR1  # the time limit is near: every task saves at the same step and ends
trap 'ended=yes' TERM  # scancel or preemption: the tasks do the same, and Slurm decides what follows

srun --export=ALL --kill-on-bad-exit=0 --wait={LEAVE_S} {agent} task {words} &
while kill -0 $! 2>/dev/null; do wait $!; done

[ -n "$ended" ] && exit 143
{agent} result
code=$?
[ $code = 75 ] && exec scontrol requeue "$SLURM_JOB_ID"  # it goes on from its newest checkpoint
exit $code
"""


def _directives(spec: ClusterSpec, name: str, run_dir: Path, job: Job) -> str:
    wanted = {
        "job-name": name,
        "ntasks": str(len(spec.tasks)),
        "nodes": job.nodes,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-task": job.gpus_per_task,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{SAVE_S}",
        "chdir": str(ROOT),
        "output": str(run_dir / "logs" / "slurm.log").replace("%", "%%"),
        "open-mode": "append",
        "export": "NONE",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in wanted.items() if value]
    return "\n".join([*lines, "#SBATCH --requeue"])
