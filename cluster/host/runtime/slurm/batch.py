"""A run as a Slurm job: what is requested of Slurm, and the batch script, with a Slurm task for each of ours."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.contract.spec import ClusterSpec
from cluster.host.runtime.job import Job
from cluster.system.paths import ROOT

SAVE_S = 120
"""How long before the end of its time a job begins to save: longer than any task takes to save and end."""
LEAVE_S = 60
"""How long the other tasks get once the first has ended, before Slurm ends them."""


def script(
    spec: ClusterSpec,
    name: str,
    run_dir: Path,
    job: Job,
    environment: Mapping[str, str],
    agent: Sequence[str],
    *,
    elastic: bool = False,
) -> str:
    """Return the batch script of a run.

    Args:
        spec: the cluster; where its tasks will be is not known yet.
        name: of the job.
        run_dir: the run's folder, which every node sees under this name.
        job: what is requested of Slurm.
        environment: what every task gets.
        agent: the command of every task's agent.
        elastic: whether the job outlives the loss of a node, without which its run may go on.
    """
    outlives = "--no-kill --wait=0" if elastic else f"--wait={LEAVE_S}"
    step = shlex.join([sys.executable, "-m", "cluster.agent.schedulers.slurm"])
    directives = "\n".join(map(_directive, options(spec, name, run_dir, job, elastic=elastic)))
    exported = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items()))
    return f"""#!/bin/bash
{directives}

{exported}

trap {shlex.quote(f"{step} stop")} USR1  # the time limit is near: every task saves at the same step and ends
trap 'ended=yes' TERM  # scancel or preemption: the tasks do the same, and Slurm decides what follows

srun --export=ALL --kill-on-bad-exit=0 {outlives} {step} task {shlex.join(agent)} &
while kill -0 $! 2>/dev/null; do wait $!; done

[ -n "$ended" ] && exit 143
{step} result
code=$?
[ $code = 75 ] && exec scontrol requeue "$SLURM_JOB_ID"  # it goes on from its newest checkpoint
exit $code
"""


def options(spec: ClusterSpec, name: str, run_dir: Path, job: Job, *, elastic: bool) -> list[str]:
    """Return what the job of a run requests, as `sbatch` takes it; see `script` for the arguments."""
    requested = {
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
    words = [f"--{name}={value}" for name, value in requested.items() if value]
    return [*words, *(["--no-kill"] if elastic else []), "--requeue"]


def _directive(option: str) -> str:
    name, given, value = option.partition("=")
    return f"#SBATCH {name}{given}{shlex.quote(value) if given else ''}"
