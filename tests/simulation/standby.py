"""Standby processes in a simulated run, and the clusters they form (cluster/contract/recovery/standby_cluster.py).

One is ready once all have joined, and cannot be used once one of its processes has ended; some of the others then lose
contact and end soon after. It trains once every agent has opened the gate of its standby process; until then those that
wait for the others can lose contact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from cluster.contract import tf_config
from cluster.contract.recovery import standby_cluster
from cluster.contract.spec import ClusterSpec, Task
from tests.simulation.world import Now

if TYPE_CHECKING:
    from tests.simulation.program import SimProgram
    from tests.simulation.training import Training

NOTICED_SHARE = 0.5
"""How many standby processes notice that another one of their cluster has ended."""


class StandbyCluster:
    """The standby processes that follow the programs of one generation."""

    def __init__(self, training: Training, generation: int, members: set[str]) -> None:
        self.generation = generation
        self.trains = False
        """Whether all gates are open, so that its members train together."""
        self._training, self._expected = training, members
        self._members: dict[str, SimProgram] = {}
        self._broken = False

    def join(self, program: SimProgram) -> None:
        """Take in a standby process that has imported TensorFlow; the last one makes all of them ready."""
        if not self._members:
            self._broken = False  # all processes of the previous cluster have ended
        if program.owner.name in self._members:
            self._break()  # its place is taken: TensorFlow lets nobody in twice
        self._members[program.owner.name] = program
        if self._broken:
            self._break()
        elif self._members.keys() == self._expected:
            for each in self._members.values():
                Now.world.at(Now.world.random.uniform(0.1, 1.5), lambda each=each: self._report(each))

    def _report(self, program: SimProgram) -> None:
        if program.runs and program.standby:
            standby_cluster.report_ready(Now.world.folder, program.owner.name, self.generation, program.cluster_number)
            program.owner.cache.forget(f"standby/{program.owner.name}")

    def left(self, program: SimProgram) -> None:
        """Let the others lose contact with a process that ended, unless they train: their session sees to that."""
        if self._members.get(program.owner.name) is program:
            del self._members[program.owner.name]
        if not self.trains:
            self._break()

    def froze(self, program: SimProgram, patience_s: float) -> None:
        """Let all lose contact with one that is frozen for too long."""
        if not self.trains and program.frozen_until - Now.world.now > patience_s:
            Now.world.at(patience_s, lambda: None if self.trains else self._break())

    def _break(self) -> None:
        self._broken = True
        for each in self._members.values():
            if Now.world.random.random() < NOTICED_SHARE:
                Now.world.at(Now.world.random.uniform(1, 11), lambda each=each: self._lose_contact(each))

    def _lose_contact(self, program: SimProgram) -> None:
        if not self.trains:
            self._training.lose_contact(program)


def port(environment: Mapping[str, str], spec: ClusterSpec, task: Task) -> int:
    """Return the port that a program's TensorFlow server will listen on; 0 if it has none."""
    if (config := environment.get(standby_cluster.VARIABLE)) is None:
        return task.port if task in spec.members else 0
    if not config:
        return 0  # the cluster of a chief that continues alone: its program has no TF_CONFIG, so it starts no server
    cluster, role, index = tf_config.parse(config)
    return int(cluster[role][index].rpartition(":")[2])


class SimRecord:
    """The record of a task's standby process: what `standby_cluster` does with a path, itself or by `records`."""

    def __init__(self, run: Any, task: str) -> None:
        self._run, self._task = run, task
        self.parent = self

    def mkdir(self, **_: Any) -> None:
        """Make its folder."""

    def unlink(self, **_: Any) -> None:
        self._run.world.operation("withdraw the standby process")
        self._run.standby.pop(self._task, None)

    def exists(self) -> bool:
        self._run.world.operation("read")
        return not self._run.cache.hides(f"standby/{self._task}", exists=self._task in self._run.standby)

    def write_json(self, value: dict[str, Any], *, durable: bool) -> None:
        assert not durable
        self._run.world.operation("report the standby process")
        self._run.standby[self._task] = value

    def create_json(self, value: dict[str, Any]) -> None:
        self._run.world.operation("replace the standby cluster")
        self._run.standby.setdefault(self._task, value)
        self._run.cache.forget(f"standby/{self._task}")

    def read_record(self, check: Callable[[Any], Any], default: Any) -> Any:
        return check(self._run.standby[self._task]) if self.exists() else default


class SimMemory:
    """Replaces the module `memory` in `cluster.agent.standby`: there is always enough."""

    available_bytes = headroom_bytes = staticmethod(lambda: 2**50)
    used_bytes = staticmethod(lambda _pid: 0)


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace what `standby_cluster` reads and writes; all synchronous training of these schedules can use it."""
    patch.setattr(standby_cluster, "is_possible", lambda _run, spec: spec.kind.synchronous)
    for name in ("write_json", "create_json"):
        patch.setattr(standby_cluster, name, getattr(SimRecord, name))
    patch.setattr(standby_cluster, "records", SimRecord)
    patch.setattr(standby_cluster, "_path", SimRecord)
    patch.setattr(
        standby_cluster,
        "_replaced",
        lambda run, generation, number: SimRecord(run, f"replaced-{generation}-{number}"),
    )
