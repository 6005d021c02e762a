"""The cluster as a job of a Slurm site: queued by `sbatch`, found by its name, ended by `scancel`.

What the job runs on its nodes is `cluster/agent/schedulers/slurm.py`. With `--apptainer` its tasks run in containers of
Apptainer, which sites allow where Docker is not: no daemon, no root. The image brings Python and what the tasks import;
their code is this checkout, as without a container. Agents and programs keep the node's process numbers and network.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.contract.findings import Finding
from cluster.contract.run import owner, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Place
from cluster.contract.spec import ClusterSpec
from cluster.host.gpu.placement import NO_DEVICE
from cluster.host.runtime import hosts, inherited, resources
from cluster.host.runtime.base import Availability, ScheduledRuntime, Shell, Workload
from cluster.host.runtime.injector import FaultInjector
from cluster.host.runtime.resources import Job, Network
from cluster.host.runtime.slurm_queue import CHECK_S, NOT_INSTALLED, JobState, Queue, last_line
from cluster.system import processes
from cluster.system.errors import ClusterError, TimedOut, UsageError
from cluster.system.files import open_file
from cluster.system.paths import ROOT
from cluster.system.waiting import wait_until

SAVE_S = 120
"""How long before the end of its time a job begins to save: longer than any task takes to save and end."""
LEAVE_S = 60
"""How long the other tasks get once the first has ended, before Slurm ends them."""


def batch_script(
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
    directives = "\n".join(map(_directive, sbatch_options(spec, name, run_dir, job, elastic=elastic)))
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


def sbatch_options(spec: ClusterSpec, name: str, run_dir: Path, job: Job, *, elastic: bool) -> list[str]:
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


PYTHON = "python"
_SEPARATORS = ",:"
"""What `apptainer exec --bind` reads as the end of a path."""


def apptainer_command(work: Workload) -> list[str]:
    """Return the words that start Python in the image.

    Raises:
        UsageError: the run needs packages that the image may lack, or a path cannot be mounted.
    """
    if work.payload.packages:
        raise UsageError("--requirements with --apptainer: install the packages into the image; leave one of them out")
    options = ["--no-home", *(["--nv"] if work.job.gpus_per_task else []), f"--pwd={ROOT}"]
    binds = [f"--bind={bind}" for bind in _binds(work)]
    # A user's own packages, and those of another Python, are none of the image's.
    alone = ["--env=PYTHONNOUSERSITE=1"]
    return ["apptainer", "--silent", "exec", *options, *alone, *binds, work.job.apptainer, PYTHON]


def _binds(work: Workload) -> Iterator[str]:
    reads = {ROOT, work.data_dir, *(folder for folder, _ in work.payload.mounts())}
    for path, mode in [*((path, "ro") for path in sorted(reads)), (work.run.path, "rw")]:
        if set(_SEPARATORS) & set(str(path)):
            raise UsageError(f"--apptainer: a path with a comma or a colon cannot be mounted: {path}; rename it")
        yield f"{path}:{path}:{mode}"


SRUN_S = 60.0


class SlurmFaults(FaultInjector):
    """Injects faults into the tasks of a job, by signals on their nodes."""

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
        place = self._place(task)
        job, node = (place and place.job) or self._job(), place.node if place else ""
        step = ["srun", f"--jobid={job}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
        code, _, complained = processes.run([*step, "kill", f"-{number}", *words], SRUN_S)
        if code:
            raise ClusterError(
                f"srun on {node or 'a node'} of job {job or 'none'}: {' '.join(complained.split())[:200]}"
            )

    def _place(self, task: str) -> Place | None:
        """Return where a task was last; a replacement of it is in a job of its own."""
        attempts = sorted((self._run.control / "slurm").glob(f"*/{task}.json"), key=lambda path: path.stat().st_mtime)
        return records.read(attempts[-1], Place.from_json) if attempts else None

    def pause(self, task: str) -> None:
        """Stop the agent first: otherwise it would end the frozen program."""
        self._frozen.add(task)
        self.signal(task, signal.SIGSTOP, "agent", "program")

    def undo(self, task: str) -> None:
        """Undo lasting faults; the program may have ended meanwhile."""
        if task in self._frozen:
            self._frozen.discard(task)
            with contextlib.suppress(ClusterError):
                self.signal(task, signal.SIGCONT, "program", "agent")
        super().undo(task)


END_S = 90.0
"""Longest wait for a job to be gone after `scancel`: Slurm gives its tasks KillWait, 30 s, before it kills them."""
POLL_S = 0.5


class Slurm(ScheduledRuntime):
    """Tasks of one Slurm job, on nodes that share this checkout, its environment and the folders of runs and data."""

    name = "slurm"
    tasks = "tasks of a Slurm job"
    look_s = 5.0  # many users share a site's controller
    way_back = "use a login node"
    job_options = frozenset({"partition", "time", "account", "nodes", "cpus_per_task", "gpus_per_task", "apptainer"})

    def __init__(self) -> None:
        super().__init__()
        self._queue = Queue()
        self._said: dict[str, tuple[float, str]] = {}

    def probe(self) -> Availability:
        """Return whether Slurm's controller answers."""
        code, printed, complained = self._queue.nodes()
        if code:
            return Availability(False, f"Slurm does not answer ({last_line(complained)})", self.way_back)
        return Availability(True, "queued by sbatch" if printed.strip() else "this cluster has no nodes now")

    def examine(self) -> list[Finding]:
        """Return whether Slurm answers and has nodes; nothing where it is not installed."""
        code, printed, complained = self._queue.nodes(CHECK_S)
        if code in NOT_INSTALLED:
            return []
        if code:
            return [
                Finding("slurm", "warning", last_line(complained), "scontrol ping; until then use another --runtime")
            ]
        return [Finding("slurm", "ok", ", ".join(printed.split("\n")[:-1]) or "no nodes")]

    def examine_hosts(self, runs_dir: Path, data_dir: Path) -> list[Finding]:
        """Return what the nodes have of what a run needs."""
        code, _, complained = self._queue.nodes(CHECK_S)
        if code:
            return [Finding("hosts", "failed", f"Slurm does not answer: {last_line(complained)}", self.way_back)]
        return hosts.examine_slurm(runs_dir, data_dir)

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:  # noqa: ARG002
        """Return the network of the nodes, with a warning: nothing closes it to others."""
        resources.check_network(requested)
        if requested == resources.PRIVATE:
            raise UsageError(
                f"--network {requested}: tasks of a Slurm job are in the network of their nodes; leave it out"
            )
        exposed = "TensorFlow's servers ask for no password, and whoever reaches the nodes reaches them"
        return Network(
            resources.HOST, requested or previous, f"warning: {exposed}: see docs/guides/slurm.md" if serves else ""
        )

    def render(self, work: Workload) -> dict[str, Any]:
        """Return the batch script."""
        given = {name: value for name, value in _environment(work).items() if not name.startswith("SLURM")}
        python = apptainer_command(work) if work.job.apptainer else [sys.executable]
        agent = [*python, "-m", "cluster.agent", *work.payload.command()]
        name, elastic = job_name(work.run), bool(work.elastic)
        text = batch_script(work.cluster, name, work.run.path, work.job, given, agent, elastic=elastic)
        return {"runtime": self.name, "script": text}

    def preflight(self, work: Workload, ending: int = 0) -> None:  # noqa: ARG002  # a job of its own
        """Check that Slurm would take the job; it knows which nodes have what that requests.

        Raises:
            UsageError: it never would.
        """
        name, elastic = job_name(work.run), bool(work.elastic)
        if why := self._queue.refusal(sbatch_options(work.cluster, name, work.run.path, work.job, elastic=elastic)):
            raise UsageError(
                f"{work.job.described or 'the job'}: Slurm refuses it: {why}; `sinfo --long` shows what it has"
            )

    def commands(self, work: Workload, rendered: dict[str, Any]) -> list[str]:
        """Return the command that queues the job, with its script."""
        return [f"{_sbatch(work)} <<'SCRIPT'\n{rendered['script']}SCRIPT"]

    def start(self, work: Workload, sh: Shell) -> None:
        """Queue the job."""
        path = work.run.control / "job.sh"
        with open_file(path, "wb") as file:
            file.write(self.render(work)["script"].encode())
        owner.begin(work.run, self.name)
        sh(f"{_sbatch(work)} {shlex.quote(str(path))}")

    def situation(self, run: RunFolder) -> str:
        """Return why the run's job is queued, or how it ended without its tasks being heard."""
        name, now = job_name(run), time.monotonic()
        if name not in self._said or now - self._said[name][0] > self.look_s:
            self._said[name] = (now, _described(run, self._queue.newest(name)))
        return self._said[name][1]

    def scheduled_name(self, run: RunFolder) -> str:
        """Return the name of the run's job."""
        return job_name(run)

    def has_tasks(self, name: str) -> bool:
        """Return whether the job of this name runs or is queued."""
        return bool(self._queue.jobs(name))

    def scheduled(self) -> Collection[str]:
        """Return the names of this user's jobs."""
        return self._queue.jobs().values()

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        """Cancel the run's job, unless it ends by itself, and wait until it is gone, with those of replacements."""
        name = job_name(run)
        wait_until(lambda: not self._queue.jobs(name), grace_s, POLL_S)
        if jobs := self._queue.jobs(name, parts=True):
            sh(shlex.join(["scancel", *(["--signal=KILL", "--full"] if not grace_s else []), *jobs]))
        if not wait_until(lambda: not self._queue.jobs(name, parts=True), END_S, POLL_S):
            raise TimedOut(f"job {' '.join(jobs)} of {run.name} does not end; `scontrol show job` says why")

    def faults(self, run: RunFolder) -> FaultInjector:
        """Return what disturbs tasks on their nodes."""
        return SlurmFaults(run, lambda: next(iter(self._queue.jobs(job_name(run))), ""))


def job_name(run: RunFolder) -> str:
    """Return what the run's job is called: readable, and another name for each run folder that a user has."""
    return f"tf-cluster-{run.name}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:8]}"


def _described(run: RunFolder, job: JobState | None) -> str:
    if job is None:
        return ""
    why = "" if job.reason == "None" else f": {job.reason}"  # the scheduler has not looked at it yet
    if job.in_progress:
        held = f"; `scontrol release {job.number}` lets it begin" if "held" in job.reason.lower() else ""
        return f"job {job.number} is queued{why}{held}" if job.state == "PENDING" else ""
    ended = f"job {job.number} ended{f' on {job.node}' if job.node else ''}: {job.state} ({job.reason})"
    if run.log("slurm").exists():
        return f"{ended}; see logs/slurm.log of the run"
    return (
        f"{ended} before any task began, as where a node cannot write {run.path}; let every node see RUNS_DIR under "
        "that path, `invoke doctor --runtime slurm` tries it"
    )


def _sbatch(work: Workload) -> str:
    """Return the command that queues a batch script, with the variables whose values are in no file of the run."""
    names = _secrets(work)
    return f"sbatch --export={','.join(names)}" if names else "sbatch"


def _secrets(work: Workload) -> list[str]:
    """Return the variables that `--env NAME` takes from the caller."""
    return [name for name, value in inherited.parse(work.payload.env).items() if value is None]


def _environment(work: Workload) -> dict[str, str]:
    """Return what every task gets: nothing of the node that it will be on is known yet."""
    payload = work.payload
    kept, path = inherited.for_process(), payload.local_path()
    if work.job.apptainer:
        kept, path = inherited.for_image(), payload.path
    more = payload.environment(work.cluster, path)
    given = {name: value for name, value in more.items() if value is not None}
    own = {"RUN_DIR": str(work.run.path), "DATA_DIR": str(work.data_dir)}
    gpus = {"GPUS_PER_TASK": work.job.gpus_per_task} if work.job.gpus_per_task else {"CUDA_VISIBLE_DEVICES": NO_DEVICE}
    elsewhere = {"TMPDIR", *_secrets(work)}  # a node has a folder of its own
    return {name: value for name, value in (kept | given | own | gpus).items() if name not in elsewhere}
