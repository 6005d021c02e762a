"""The cluster as a job of a Slurm site: queued by `sbatch`, found by its name, ended by `scancel`.

`batch.py` has the batch script, `queue.py` the questions to the controller. What the job runs on its nodes is
`cluster/agent/schedulers/slurm.py`.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.errors import PrerequisiteError, TimedOut, UsageError
from cluster.findings import Finding
from cluster.gpu.placement import NO_DEVICE
from cluster.run import owner
from cluster.run.folder import RunFolder
from cluster.runtime import inherited, network
from cluster.runtime.base import Availability, Remains, Runtime, Shell, Workload
from cluster.runtime.faults import FaultInjector
from cluster.runtime.network import Network
from cluster.runtime.slurm import batch, hosts
from cluster.runtime.slurm.faults import SlurmFaults
from cluster.runtime.slurm.queue import NOT_INSTALLED, Queue, last_line
from cluster.system.files import open_file

END_S = 90.0
"""Longest wait for a job to be gone after `scancel`: Slurm gives its tasks KillWait, 30 s, before it kills them."""
POLL_S = 0.5
LOOK_S = 5.0


class Slurm(Runtime):
    """Tasks of one Slurm job, on nodes that share this checkout, its environment and the folders of runs and data."""

    name = "slurm"
    tasks = "tasks of a Slurm job"
    is_remote = True
    job_options = frozenset({"partition", "time", "account", "nodes", "cpus_per_task", "gpus_per_task"})

    def __init__(self) -> None:
        self._queue = Queue()
        self._seen: dict[str, tuple[float, bool]] = {}
        """When each job was looked for last, and whether it was there."""

    def probe(self) -> Availability:
        """Return whether Slurm's controller answers."""
        code, printed, complained = self._queue.nodes()
        if code:
            return Availability(False, f"Slurm does not answer ({last_line(complained)})", "use a login node")
        return Availability(True, "queued by sbatch" if printed.strip() else "this cluster has no nodes now")

    def examine(self) -> list[Finding]:
        """Return whether Slurm answers and has nodes; nothing where it is not installed."""
        code, printed, complained = self._queue.nodes()
        if code in NOT_INSTALLED:
            return []
        if code:
            return [
                Finding("slurm", "warning", last_line(complained), "scontrol ping; until then use another --runtime")
            ]
        return [Finding("slurm", "ok", ", ".join(printed.split("\n")[:-1]) or "no nodes")]

    def examine_hosts(self, runs_dir: Path, data_dir: Path) -> list[Finding]:
        """Return what the nodes have of what a run needs."""
        return hosts.examine(runs_dir, data_dir)

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:  # noqa: ARG002
        """Return the network of the nodes, with a warning: nothing closes it to others."""
        network.check(requested)
        if requested == network.PRIVATE:
            raise UsageError(
                f"--network {requested}: tasks of a Slurm job are in the network of their nodes; leave it out"
            )
        exposed = "TensorFlow's servers ask for no password, and whoever reaches the nodes reaches them"
        return Network(network.HOST, requested or previous, f"warning: {exposed}: see docs/slurm.md" if serves else "")

    def render(self, work: Workload) -> dict[str, Any]:
        """Return the batch script."""
        given = {name: value for name, value in _environment(work).items() if not name.startswith("SLURM")}
        arguments, elastic = work.payload.command(), bool(work.elastic)
        text = batch.script(
            work.cluster, job_name(work.run), work.run.path, work.job, given, arguments, elastic=elastic
        )
        return {"runtime": self.name, "script": text}

    def preflight(self, work: Workload, ending: int = 0) -> None:
        """Leave memory and GPUs to Slurm, which gives the job nodes that have them."""

    def commands(self, work: Workload, rendered: dict[str, Any]) -> list[str]:  # noqa: ARG002
        """Return the command that queues the job, with its script."""
        return [f"sbatch <<'SCRIPT'\n{rendered['script']}SCRIPT"]

    def start(self, work: Workload, sh: Shell) -> None:
        """Queue the job."""
        path = work.run.control / "job.sh"
        with open_file(path, "wb") as file:
            file.write(self.render(work)["script"].encode())
        owner.begin(work.run, self.name)
        sh(shlex.join(["sbatch", str(path)]))

    def alive(self, run: RunFolder) -> bool:
        """Whether the run's job runs or is queued; also where Slurm does not say, so that no run is taken for dead."""
        name, now = job_name(run), time.monotonic()
        if name not in self._seen or now - self._seen[name][0] > LOOK_S:  # many users share a site's controller
            try:
                self._seen[name] = (now, bool(self._queue.jobs(name)))
            except PrerequisiteError:
                self._seen[name] = (now, True)
        return self._seen[name][1]

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        """Cancel the run's job, unless it ends by itself, and wait until it is gone."""
        deadline = time.monotonic() + grace_s
        while self._queue.jobs(job_name(run)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        deadline = time.monotonic() + END_S
        if jobs := self._queue.jobs(job_name(run)):
            sh(shlex.join(["scancel", *(["--signal=KILL", "--full"] if not grace_s else []), *jobs]))
        while jobs := self._queue.jobs(job_name(run)):
            if time.monotonic() > deadline:
                raise TimedOut(f"job {' '.join(jobs)} of {run.name} does not end; `scontrol show job` says why")
            time.sleep(POLL_S)

    def remains(self, runs_dir: Path, names: Collection[str]) -> Remains:
        """Return the runs that have a job."""
        mine = {name for name in names if _is_mine(RunFolder(runs_dir / name))}
        if not mine:
            return Remains(frozenset())
        try:
            queued = set(self._queue.jobs().values())
        except PrerequisiteError as error:
            return Remains(frozenset(), f"{error}; use a login node")
        return Remains(frozenset(name for name in mine if job_name(RunFolder(runs_dir / name)) in queued))

    def faults(self, run: RunFolder) -> FaultInjector:
        """Return what disturbs tasks on their nodes."""
        return SlurmFaults(run, lambda: next(iter(self._queue.jobs(job_name(run))), ""))


def job_name(run: RunFolder) -> str:
    """Return what the run's job is called: readable, and another name for each run folder that a user has."""
    return f"tf-cluster-{run.name}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:8]}"


def _is_mine(run: RunFolder) -> bool:
    """Whether the run was started as a job and nobody has seen its end: its record is kept until the job is gone."""
    if not owner.record_path(run).exists():
        return False
    owned = owner.read(run)
    return (owned.runtime if owned else run.composed.get("runtime")) == Slurm.name


def _environment(work: Workload) -> dict[str, str]:
    """Return what every task gets: nothing of the node that it will be on is known yet."""
    payload = work.payload
    more = payload.environment(work.cluster, payload.local_path())
    kept = inherited.for_process([name for name, value in more.items() if value is None])
    given = {name: value for name, value in more.items() if value is not None}
    own = {"RUN_DIR": str(work.run.path), "DATA_DIR": str(work.data_dir)}
    gpus = {"GPUS_PER_TASK": work.job.gpus_per_task} if work.job.gpus_per_task else {"CUDA_VISIBLE_DEVICES": NO_DEVICE}
    temporary = {"TMPDIR"} & kept.keys()  # this machine's own; a node has another
    return {name: value for name, value in (kept | given | own | gpus).items() if name not in temporary}
