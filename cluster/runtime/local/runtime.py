"""The cluster as processes of this machine, which a supervisor starts and restarts, see `supervisor.py`."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.errors import ClusterError
from cluster.findings import Finding
from cluster.run.folder import RunFolder
from cluster.runtime import memory, network, toolkit
from cluster.runtime.base import Availability, Remains, Runtime, Shell, Workload
from cluster.runtime.faults import FaultInjector
from cluster.runtime.local import supervisor
from cluster.runtime.local.faults import ProcessFaults
from cluster.runtime.local.processes import processes_of
from cluster.runtime.network import Network
from cluster.system import process_table
from cluster.system.ports import free_ports


class LocalProcesses(Runtime):
    """Processes of this machine."""

    name = "local"
    tasks = "local processes"
    automatic = True
    reaches_hardware = True

    def probe(self) -> Availability:
        """Return that processes can always be started."""
        return Availability(True)

    def examine(self) -> list[Finding]:
        """Return whether there is memory for a few tasks, and whether they can have a network of their own."""
        found = Finding("memory", "ok", "enough for a chief and 2 workers")
        try:
            memory.check_free(3)
        except ClusterError as error:
            found = Finding("memory", "failed", str(error), "free memory, or start fewer tasks: --workers 0")
        return [found, network.examine()]

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:
        """Return a network of the tasks' own where they can have one, or this machine's."""
        return network.of_processes(requested, previous, way_out=way_out, serves=serves)

    def ports(self, num_tasks: int) -> tuple[int, ...]:
        """Return a free port for each task."""
        return free_ports(num_tasks)

    def render(self, work: Workload) -> dict[str, Any]:
        """Return each task's command and environment."""
        payload = work.payload
        more = payload.environment(work.cluster, payload.local_path())
        return processes_of(
            work.cluster, work.run.path, work.data_dir, payload.command(), more, work.gpus, work.network.name
        )

    def preflight(self, work: Workload, ending: int = 0) -> None:
        """Check that enough memory is free, and that this environment can use GPUs."""
        memory.check_free(len(work.cluster.tasks), ending)
        if work.gpus.ids:
            toolkit.check_here()

    def commands(self, work: Workload, rendered: dict[str, Any]) -> list[str]:  # noqa: ARG002
        """Return each task's command, without the supervisor that brings it back."""
        found = []
        for task in rendered["tasks"].values():
            environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in task["environment"].items())
            found.append(f"{environment} {shlex.join(task['command'])} &")
        return found

    def start(self, work: Workload, sh: Shell) -> None:  # noqa: ARG002
        """Start the run's supervisor."""
        supervisor.start(work.run)

    def alive(self, run: RunFolder) -> bool:
        """Whether the run's supervisor is alive."""
        return supervisor.running(run)

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:  # noqa: ARG002
        """Kill every process of the run; agents that can end by themselves have done so before."""
        supervisor.kill(run)

    def remains(self, runs_dir: Path, names: Collection[str]) -> Remains:
        """Return the runs of which a process is left, in one look at all processes."""
        table = process_table.ProcessTable()
        left = (name for name in names if supervisor.processes_left(RunFolder(runs_dir / name), table))
        return Remains(frozenset(left))

    def faults(self, run: RunFolder) -> FaultInjector:
        """Return what disturbs processes."""
        return ProcessFaults(run)
