"""Replacements of the tasks that an elastic Slurm job has lost with their nodes.

Slurm takes a lost node out of a job and gives it no other. So with `--grow` the first process of the chief's task
queues a job of one task, on any node, for each task that the run continues without. Its script is that of the run's
job. The task records its place next to the others'; from there the chief alone puts it into the cluster. Then the
chief's agent takes the task in as it does everywhere.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cluster.agent import elastic
from cluster.contract.run import membership, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Place
from cluster.system import processes
from cluster.system.errors import ClusterError
from cluster.system.json_files import write_json

LOOK_S = 2.0
ANSWER_S = 30.0
TASK, ATTEMPT = "REPLACED_TASK", "ATTEMPT"
"""The variables of a replacement: which task it is, and the name of the folder of the job's attempt."""


class Replacements:
    """The replacements of one attempt of a job."""

    def __init__(self, run: RunFolder, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch a run whose tasks record their places in a folder."""
        self._run, self._folder, self._clock = run, folder, clock
        self._queued: dict[str, int] = {}
        """How often a replacement was queued for each task that is left out."""
        self._due: dict[str, float] = {}
        """When the next one may be."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def end(self) -> None:
        """Watch no longer, and take from the queue what is in it."""
        self._ended.set()
        self._thread.join()
        for name in self._queued:
            self._withdraw(name)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
            except (ClusterError, OSError) as error:  # such as of a shared folder that is away
                print(f"replacements: {error}", file=sys.stderr, flush=True)

    def look(self) -> None:
        """Queue a replacement of each task that lacks one, and admit those that have started."""
        absent = membership.left_out(self._run) if self._run.outcome is None else frozenset[str]()
        for name in set(self._queued) - absent:  # it may have returned by itself
            self._withdraw(name)
            del self._queued[name], self._due[name]
        for name in sorted(absent):
            self._admit(name)
            if self._clock() >= self._due.get(name, 0.0):
                self._queue(name)

    def _admit(self, name: str) -> None:
        """Put the place of a task that has started into the cluster."""
        path = self._folder / "cluster.json"
        cluster = records.read(path, records.cluster)
        task, place = cluster.task(name), records.read(self._folder / f"{name}.json", Place.from_json, None)
        if place and (place.host, place.port) != (task.host, task.port):
            moved = replace(task, host=place.host, port=place.port)
            tasks = tuple(moved if each.name == name else each for each in cluster.tasks)
            write_json(path, replace(cluster, tasks=tasks).to_json())

    def _queue(self, name: str) -> None:
        """Queue a replacement, unless there is one; the pauses grow, should none come to be taken in."""
        times = self._queued.setdefault(name, 0)
        self._due[name] = self._clock() + elastic.patience_s(times + 1)
        code, printed, _ = processes.run(
            ["squeue", "--me", "--noheader", "--format=%i", f"--name={_job(name)}"], ANSWER_S
        )
        if code or printed.strip():
            return
        self._queued[name] = times + 1
        job = [f"--job-name={_job(name)}", "--ntasks=1", "--nodes=1", "--no-requeue"]
        variables = f"--export=ALL,{TASK}={name},{ATTEMPT}={self._folder.name}"
        command = ["env", *_without_slurm(), "sbatch", *job, variables, str(self._run.control / "job.sh")]
        code, printed, complained = processes.run(command, ANSWER_S)
        print(f"replacement of {name}: {(complained if code else printed).strip()}", file=sys.stderr, flush=True)

    def _withdraw(self, name: str) -> None:
        """Take a task's replacement from the queue; one that runs ends by itself."""
        processes.run(["scancel", "--state=PENDING", f"--jobname={_job(name)}"], ANSWER_S)


def _job(task: str) -> str:
    """Return the name of a replacement's job, by which it is found and cancelled."""
    return f"{os.environ['SLURM_JOB_NAME']}.{task}"


def _without_slurm() -> list[str]:
    """Return arguments of `env` that unset this job's Slurm variables, which another job would take for requests."""
    return [f"--unset={name}" for name in os.environ if name.startswith(("SLURM", "SRUN", "SBATCH"))]
