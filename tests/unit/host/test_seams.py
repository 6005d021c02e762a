"""A runtime, a fault and a strategy added from outside: nothing else has to change for them."""

import os
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from cluster.contract import spec, strategies
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.contract.strategies import Strategy
from cluster.host.control import chaos, ending, foreground
from cluster.host.image.engine import Availability
from cluster.host.launch import folders, planning, startup
from cluster.host.options.request import Request
from cluster.host.runtime import registry
from cluster.host.runtime.base import Runtime, Shell, Workload
from cluster.host.runtime.local_runtime import ProcessFaults, processes_of
from cluster.host.view.status import read_status
from cluster.system import processes
from cluster.system.errors import EXIT_DONE, UsageError
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from cluster.system.ports import free_ports
from tests import fast
from tests.support.launching import Commands


class Nudges(ProcessFaults):
    """Faults of processes, and a new one."""

    def nudge(self, task: str) -> None:
        self.signal(task, signal.SIGCONT, "program")


class Toy(Runtime):
    """Agents of this machine that nobody looks after."""

    name = "toy"
    tasks = "toys"
    injector = Nudges

    def __init__(self) -> None:
        self.agents: dict[str, list[subprocess.Popen[bytes]]] = {}

    def probe(self) -> Availability:
        return Availability(True, "made of wood")

    def ports(self, num_tasks: int) -> tuple[int, ...]:
        return free_ports(num_tasks)

    def render(self, work: Workload) -> dict[str, Any]:
        rendered = processes_of(work.cluster, work.run.path, work.data_dir, work.payload.command())
        return {"x-runtime": self.name, "tasks": rendered["tasks"]}

    def preflight(self, work: Workload, ending: int = 0) -> None:
        pass

    def commands(self, work: Workload) -> list[str]:
        return [f"play with {task.name}" for task in work.cluster.tasks]

    def start(self, work: Workload, sh: Shell) -> None:
        owner.create_owner(work.run, self.name)
        self.agents[work.run.name] = [
            subprocess.Popen(
                task["command"], cwd=ROOT, env=os.environ | task["environment"], preexec_fn=processes.die_with_parent
            )
            for task in work.run.composed["tasks"].values()
        ]

    def alive(self, run: RunFolder) -> bool:
        return any(agent.poll() is None for agent in self.agents.get(run.name, []))

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:
        for agent in self.agents.pop(run.name, []):
            agent.kill()
            agent.wait()

    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        return {name for name in names if self.alive(RunFolder(runs_dir / name))}


@pytest.fixture
def toy(monkeypatch) -> Toy:
    """A runtime that is registered like ours, and a kind of fault."""
    made = Toy()
    monkeypatch.setitem(registry.RUNTIMES, made.name, made)
    monkeypatch.setitem(chaos.KINDS, "nudge", chaos.FaultKind("nudge"))
    return made


def test_a_runtime_from_outside_is_planned_and_runs_a_cluster(toy, theirs):
    fast.leave_out("starts a cluster")
    sh = Commands()
    theirs.write_text("import time\nwhile True:\n    time.sleep(0.05)\n")
    requested = {"runtime": "toy", "script": str(theirs), "workers": 1, "tensorboard_port": "0"}
    planned = planning.plan(Request(**requested))
    assert ("toy", "toys: made of wood", "private") == (planned.runtime.name, planned.why_runtime, planned.network.name)
    assert ["play with chief", "play with worker-0"] == startup.list_commands(planned)
    for option in ({"network": "host"}, {"memory": "2GiB"}):
        with pytest.raises(UsageError):
            planning.plan(Request(**requested | option))
    run = startup.start_planned(planned, sh, began=time.time()).run
    try:
        assert foreground.until_training(run, lambda _: None)
        assert ["training", "training"] == [task["state"] for task in read_status(run)["tasks"]]
        assert "toy" == run.load_started().runtime
        fault = chaos.Fault("nudge", "worker-0")  # what is new, and what the runtime cannot do
        chaos.check_fault(run, fault)
        registry.find_runtime(run).injector(run).inject(fault.kind, fault.task)
        for kind in ("partition", "nothing"):
            with pytest.raises(UsageError):
                chaos.check_fault(run, chaos.Fault(kind, "worker-0"))
        assert EXIT_DONE == ending.take_down(folders.runs_dir(), None, 30, sh)  # of all that is left
        assert not toy.alive(run)
        assert "stopped" == run.load_summary().state
        assert owner.read_owner(run) is None
    finally:
        toy.remove(run, sh, 0)
    assert [] == sh


@pytest.fixture
def pair(monkeypatch) -> Strategy:
    """A strategy of two devices in one process, registered like ours."""
    record = Strategy(
        name="pair",
        class_name="PairStrategy",
        trial="--devices 2",
        topology="--workers 0 --devices 2",
        runs_on=[{"workers": (0, 0), "ps": (0, 0), "devices": (2, 2)}],
        one_process=True,
    )
    monkeypatch.setitem(strategies.STRATEGIES, record.name, record)
    return record


def test_a_strategy_from_outside_is_planned_and_its_record_read(pair, resolved):
    planned = planning.plan(Request(strategy="pair", devices=2, runtime="local", tensorboard_port="0"))
    assert ("PairStrategy", 2) == (planned.to_json()["strategy"], planned.cluster.replicas)
    planned.run.create()
    write_json(planned.run.cluster, planned.cluster.to_json())
    assert planned.cluster == planned.run.load_cluster()
    with pytest.raises(UsageError):
        planning.plan(Request(strategy="pair", devices=3, runtime="local"))


def test_a_strategy_from_outside_is_built(pair, monkeypatch):
    fast.leave_out("imports TensorFlow")
    from train import strategy

    monkeypatch.setitem(strategy.BUILDERS, "pair", lambda cluster, devices: (cluster.strategy, devices))
    cluster = spec.build(workers=0, devices=2, strategy="pair")
    assert ("pair", ["CPU:0"]) == strategy.build_strategy(cluster, ["CPU:0"])


def test_images_hold_the_agent_the_contract_and_the_system_and_nothing_of_the_host():
    copied = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!cluster")}
    assert {"!cluster/__init__.py", "!cluster/agent", "!cluster/contract", "!cluster/system"} == copied
