"""What runtimes have in common whose tasks a scheduler places: Slurm, and a Docker Swarm.

A scheduler knows a run by a name, such as a job's or a stack's, and may be slow or away. So it is asked seldom, and
never about runs that it cannot have.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection
from pathlib import Path

from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime.base import Remains, Runtime, recorded_runtime
from cluster.system.errors import PrerequisiteError


class ScheduledRuntime(Runtime):
    """A runtime whose tasks run where a scheduler places them.

    Attributes:
        look_s: how long an answer about a run is used again.
        way_back: what to do where the scheduler does not answer.
    """

    is_remote = True
    look_s: float
    way_back: str

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, bool]] = {}
        """When the scheduler was asked about each run last, and whether it had tasks of it."""

    @abstractmethod
    def scheduled_name(self, run: RunFolder) -> str:
        """Return what the scheduler knows the run by."""

    @abstractmethod
    def has_tasks(self, name: str) -> bool:
        """Return whether tasks of this name run, or are about to.

        Raises:
            PrerequisiteError: the scheduler does not say.
        """

    @abstractmethod
    def scheduled(self) -> Collection[str]:
        """Return the names that the scheduler has anything of.

        Raises:
            PrerequisiteError: it does not say.
        """

    def alive(self, run: RunFolder) -> bool:
        """Whether tasks of the run run, or are about to; also where the scheduler does not say."""
        name, now = self.scheduled_name(run), time.monotonic()
        if name not in self._seen or now - self._seen[name][0] > self.look_s:
            try:
                self._seen[name] = (now, self.has_tasks(name))
            except PrerequisiteError:
                self._seen[name] = (now, True)
        return self._seen[name][1]

    def remains(self, runs_dir: Path, names: Collection[str]) -> Remains:
        """Return the runs that the scheduler has something of, by one question; none if no run can be one of its."""
        runs = [RunFolder(runs_dir / name) for name in names]
        # The record of a run is kept until nothing of it is left.
        ours = [run for run in runs if owner.record_path(run).exists() and recorded_runtime(run) == self.name]
        if not ours:
            return Remains(frozenset())
        try:
            scheduled = self.scheduled()
        except PrerequisiteError as error:
            return Remains(frozenset(), f"{error}; {self.way_back}")
        return Remains(frozenset(run.name for run in ours if self.scheduled_name(run) in scheduled))
