"""A frozen process of any kind, alone or with another: the run must recover or end within 90 s, and name it."""

import itertools
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.recovery import standby_cluster
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.system import processes
from cluster.system.json_files import read_json
from cluster.system.processes import ProcessTable
from tests.e2e.scenario import ENDLESS, SLOW_MACHINE_S, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

BOUND_S = 90.0
TOPOLOGIES = {
    "multiworker": ("--workers=2",),
    "elastic": ("--workers=2", "--min-workers=1", "--grow"),
    "ps": ("--workers=1", "--ps=1", "--evaluator"),
}
ROLES = {
    "multiworker": ("chief", "worker-0"),
    "elastic": ("chief", "worker-0"),
    "ps": ("chief", "worker-0", "ps-0", "evaluator"),
}
PROCESSES = ("agent", "program", "standby")
NONE = ("standby", "evaluator")
"""An evaluator has no standby process: nothing waits for it."""
SECONDS = (5.0, 30.0, None)


@dataclass(frozen=True)
class Frozen:
    """A process to freeze: the supervisor, or an agent, program or standby process of a task."""

    kind: str
    task: str = ""

    def find(self, run: RunFolder) -> dict[str, int] | None:
        """Return the identity of the process; None if there is none."""
        if self.kind == "supervisor":
            owned = owner.read_owner(run)
            assert owned
            assert owned.supervisor
            return _identity(_children(owned.supervisor["pid"]))
        recorded = read_json(run.programs(self.task), {})
        if not recorded:
            return None
        if self.kind != "standby":
            return recorded.get(self.kind)
        return _identity(_children(recorded["agent"]["pid"]) - {recorded["program"]["pid"]})


def _children(pid: int) -> set[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in path.read_text().split()} if path.exists() else set()


def _identity(pids: Iterable[int]) -> Any:
    return next((processes.identity(pid) for pid in pids), None)


def cases() -> list[Any]:
    found = []
    for strategy, roles in ROLES.items():
        alone = [(Frozen(kind, task),) for kind in PROCESSES for task in roles if (kind, task) != NONE]
        whole = [(Frozen("agent", task), Frozen("program", task)) for task in roles]
        pairs = [(Frozen("program", a), Frozen("program", b)) for a, b in itertools.combinations(roles, 2)]
        pairs += [(Frozen("agent", a), Frozen("agent", b)) for a, b in itertools.combinations(roles, 2)]
        with_supervisor = [(Frozen("supervisor"),), (Frozen("supervisor"), Frozen("agent", roles[-1]))]
        found.append(pytest.param(strategy, [*alone, *whole, *pairs, *with_supervisor], id=strategy))
    return found


@pytest.fixture(autouse=True)
def early_standby_processes(clusters, monkeypatch):
    """Standby processes that start at once, so that each freeze waits less for them."""
    monkeypatch.setitem(clusters.environment, "STANDBY_DELAY_S", "0")


@pytest.mark.alone
@pytest.mark.parametrize("seconds", SECONDS, ids=["5s", "30s", "permanent"])
@pytest.mark.parametrize(("strategy", "frozen"), cases())
def test_a_frozen_process_must_not_hold_up_the_run(clusters, strategy, frozen, seconds):
    name = f"{strategy}-{seconds or 'permanent'}"
    run = clusters.up(name, *TOPOLOGIES[strategy], "--detach", "--", *ENDLESS)
    for together in frozen:
        _await_standby(run)
        found = [each for each in (one.find(run) for one in together) if each]
        for process in found:
            processes.kill(process, signal.SIGSTOP)
        if seconds is not None:
            time.sleep(seconds)  # the length of the freeze is what is tested
            for process in found:
                processes.kill(process, signal.SIGCONT)
        _await_new_steps(run, together)
    clusters.invoke("stop", name, timeout_s=BOUND_S)
    assert "stopped" == summary(run)["state"]


@pytest.mark.alone
def test_a_run_with_a_frozen_task_must_stop_and_end(clusters):
    for command in ("stop", "down"):
        name = f"frozen-{command}"
        run = clusters.up(name, "--workers=1", "--detach", "--", *ENDLESS)
        _await_standby(run)
        for kind in ("agent", "program"):
            processes.kill(Frozen(kind, "chief").find(run), signal.SIGSTOP)
        clusters.invoke("status", name, timeout_s=BOUND_S)
        clusters.invoke(command, name, timeout_s=BOUND_S)
        assert "stopped" == summary(run)["state"]
        clusters.invoke("down", name)
        assert not [pid for pid in ProcessTable().with_environment("RUN_DIR", str(run.path)) if pid != os.getpid()]


def _await_standby(run: RunFolder) -> None:
    """Wait until the standby processes are ready where they form a cluster, otherwise until all tasks train."""

    def ready() -> bool:
        cluster, generation = run.load_cluster(), run.generation
        if standby_cluster.is_possible(run, cluster):
            left_out = sorted(run.generation_record(generation).left_out)
            return standby_cluster.is_complete(run, cluster.without(left_out), generation)
        return all(Frozen("standby", task.name).find(run) for task in cluster.tasks if ("standby", task.name) != NONE)

    wait_for(ready, "the standby processes", SLOW_MACHINE_S)


def _continues(one: Frozen, run: RunFolder) -> bool:
    """Whether a process that was frozen runs again, or another one in its place; a standby process may follow later."""
    found = one.find(run)
    if found is None:
        return one.kind == "standby"
    return processes.alive(found) and processes.stopped_at(found["pid"]) is None


def _await_new_steps(run: RunFolder, together: tuple[Frozen, ...]) -> None:
    """Wait until the frozen processes have continued or are gone, and the newest generation does new steps."""
    first: dict[int, int] = {}

    def recovered() -> bool:
        if run.outcome:
            pytest.fail(f"local tasks are replaced, but the run ended after {together} were frozen: {run.outcome}")
        beat, generation = run.heartbeat("chief"), run.generation
        if not beat or beat.generation != generation or not all(_continues(one, run) for one in together):
            return False
        return beat.state == "training" and beat.step > first.setdefault(generation, beat.step)

    wait_for(recovered, f"new steps after {together} were frozen", BOUND_S)
