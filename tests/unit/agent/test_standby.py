"""The standby process: the next attempt's program is there before it is needed, and gone after the run."""

import functools
import os
import signal
from unittest.mock import Mock

import pytest

from cluster.agent import standby
from cluster.contract import tf_config
from cluster.contract.recovery import standby_cluster
from cluster.host.runtime import supervisor
from cluster.system.json_files import write_json
from tests.support.waiting import wait_for

LINES = """
(run.path / f'{NAME}.{os.getpid()}.{GENERATION}.{RESTARTS}.standby={"STANDBY_PROCESS" in os.environ}').touch()
train(5)
if not GENERATION: work()
train(6), meet(), finish()
"""


IN_CLUSTER = {"loop": "custom", "source": "memory"}
"""A configuration with which standby processes form a cluster ahead."""
FORMED = """
if config := os.environ.get("STANDBY_CLUSTER"):
    (run.path / f'{NAME}.{GENERATION}.formed').write_text(config)
train(5)
if GENERATION < 2: work()
train(6), meet(), finish()
"""


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setenv("STANDBY", "1")
    monkeypatch.setenv("STANDBY_DELAY_S", "0")


def test_after_a_death_the_standby_processes_become_the_next_generation(start_gang):
    gang = start_gang(LINES, workers=1)
    # A supervisor, and for each task its agent, its program and the standby process.
    wait_for(lambda: len(supervisor.processes_left(gang.run)) == 8, "the standby processes")
    os.kill(gang.pid("worker-0"), signal.SIGKILL)
    assert "succeeded" == gang.summary()["state"]  # and waits until every process has ended, standby ones too
    attempts = {tuple(path.name.split(".")[::2]) for path in gang.run.path.glob("*.standby=*")}
    assert {("chief", "0", "standby=False"), ("worker-0", "0", "standby=False")} <= attempts
    assert {("chief", "1", "standby=True"), ("worker-0", "1", "standby=True")} <= attempts
    assert 4 == len(attempts)
    assert [1, 1] == [gang.beat(task).restarts for task in ("chief", "worker-0")]


@pytest.mark.slow
def test_standby_processes_that_formed_a_cluster_continue_with_it_on_the_other_ports(start_gang):
    gang = start_gang(FORMED, workers=1, config=IN_CLUSTER)
    for generation, victim in enumerate(("worker-0", "chief")):
        formed = functools.partial(standby_cluster.is_complete, gang.run, gang.run.load_cluster(), generation)
        wait_for(formed, "the cluster of the standby processes")
        gang.await_step(victim, 5)
        os.kill(gang.pid(victim), signal.SIGKILL)
        wait_for(lambda at=generation: gang.beat("chief").generation == at + 1, "the next generation")
    assert "succeeded" == gang.summary()["state"]
    assert [None, 1, 0] == [record.standby_ports for record in gang.run.generations()]
    first, second = ((gang.run.path / f"chief.{generation}.formed").read_text() for generation in (1, 2))
    assert tf_config.dumps(gang.run.load_cluster(), gang.run.load_cluster().task("chief")) == second
    ports = {
        address.rpartition(":")[2] for config in (first, second) for address in tf_config.parse(config)[0]["chief"]
    }
    assert 2 == len(ports)


@pytest.mark.parametrize(
    ("config", "topology", "possible"),
    [
        (IN_CLUSTER, {"workers": 1}, True),
        (IN_CLUSTER, {"workers": 0, "strategy": "mirrored", "devices": 2}, True),
        (IN_CLUSTER | {"loop": "fit"}, {"workers": 1}, False),
        (IN_CLUSTER | {"source": "function"}, {"workers": 1}, False),
        (IN_CLUSTER | {"callbacks": "own:callbacks"}, {"workers": 1}, False),
        (IN_CLUSTER, {"workers": 1, "ps": 1}, False),
        (IN_CLUSTER, {"workers": 1, "strategy": "pipeline"}, False),
    ],
)
def test_only_some_trainings_can_prepare_a_cluster(make_run, config, topology, possible):
    run = make_run(**topology)
    write_json(run.config, config)
    assert possible is standby_cluster.is_possible(run, run.load_cluster())


def test_only_standby_processes_of_the_same_cluster_can_train(run):
    cluster = run.load_cluster()
    for task in ("chief", "worker-0"):
        standby_cluster.report_ready(run, task, 0, standby_cluster.newest_number(run, 0))
    assert standby_cluster.is_complete(run, cluster, 0)
    for _ in range(2):  # as each agent whose standby process ended does
        standby_cluster.replace_cluster(run, 0, 0)
    assert 1 == standby_cluster.newest_number(run, 0)
    standby_cluster.report_ready(run, "chief", 0, 1)
    assert not standby_cluster.is_complete(run, cluster, 0)
    standby_cluster.report_ready(run, "worker-0", 0, 1)
    assert standby_cluster.is_complete(run, cluster, 0)
    assert 0 == standby_cluster.newest_number(run, 1)


class FakeMachine:
    """Programs that are started, and what a standby process depends on."""

    def __init__(self) -> None:
        self.started: list[Mock] = []
        self.now, self.kills = 100.0, 0

    def start(self, _environment: dict[str, str]) -> Mock:
        self.started.append(Mock(pid=1, stopped_s=0.0, is_stopped=False, ended=False))
        return self.started[-1]


@pytest.fixture
def machine(monkeypatch):
    machine = FakeMachine()
    monkeypatch.setattr(standby.time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(standby.memory, "kills", lambda: machine.kills)
    monkeypatch.setattr(standby.memory, "in_kernel_log", lambda *_: False)
    monkeypatch.setattr(standby.memory, "available_bytes", lambda: 2**50)
    monkeypatch.setattr(standby.memory, "headroom_bytes", lambda: 2**50)
    monkeypatch.setattr(standby.Standby, "_set_kill_score", lambda *_: None)
    return machine


@pytest.mark.parametrize(
    ("setting", "delays_s"), [(None, (10 + standby.STAGGER_S, standby.AFTER_FAILURE_S)), ("3", (3, 3))]
)
def test_the_standby_process_starts_sooner_after_a_failure_unless_the_delay_is_set(
    tmp_path, monkeypatch, machine, setting, delays_s
):
    monkeypatch.delenv("STANDBY_DELAY_S")
    if setting:
        monkeypatch.setenv("STANDBY_DELAY_S", setting)
    standing_by = standby.Standby(machine.start, 1, 2, tmp_path)
    standing_by.take()  # the first attempt, before any training
    for number, delay_s in enumerate(delays_s):
        standing_by.keep(training=True)
        machine.now += delay_s - 0.5
        standing_by.keep(training=True)
        assert number == len(machine.started)
        machine.now += 1
        standing_by.keep(training=True)
        assert number + 1 == len(machine.started)
        assert standing_by.take() is machine.started[-1]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("for_memory", [False, True])
def test_a_standby_process_that_ended_is_replaced_unless_memory_is_short(tmp_path, machine, stopped, for_memory):
    started = machine.started
    standing_by = standby.Standby(machine.start, 0, 1, tmp_path)
    for _ in range(2):
        standing_by.keep(training=True)
    assert 1 == len(started)
    for restarts, pause_s in ((1, standby.AGAIN_S), (2, 2 * standby.AGAIN_S)):
        if stopped:
            started[-1].stopped_s = standby.STOPPED_S + 1
        else:
            started[-1].ended = True
            started[-1].wait.return_value = -signal.SIGKILL
        machine.kills += int(for_memory)
        assert standing_by.ended
        standing_by.keep(training=True)
        machine.now += pause_s - 1
        standing_by.keep(training=True)
        assert restarts == len(started)
        machine.now += 2
        standing_by.keep(training=True)
        if for_memory and not stopped:
            assert (1, True, 1) == (len(started), standing_by.settled, standing_by.kills)
            return
        assert restarts + 1 == len(started)
    started[-1].ended = True
    assert standing_by.take() is None  # it is not handed over


@pytest.mark.parametrize(
    ("available", "headroom", "error"),
    [
        (standby.RESERVE_BYTES, 2**50, None),  # of the machine
        (2**50, standby.OWN_RESERVE_BYTES, None),  # of the task
        (2**50, 2**50, OSError("the disk is full")),
    ],
)
def test_without_memory_or_a_way_to_start_it_there_is_no_standby_process(
    tmp_path, monkeypatch, available, headroom, error
):
    monkeypatch.setattr(standby.memory, "available_bytes", lambda: available)
    monkeypatch.setattr(standby.memory, "headroom_bytes", lambda: headroom)
    standing_by = standby.Standby(start := Mock(side_effect=error), 0, 1, tmp_path / "log")
    for _ in range(3):
        standing_by.keep(training=True)
    assert (int(bool(error)), True, None) == (start.call_count, standing_by.settled, standing_by.take())
    assert not error or str(error) in (tmp_path / "log").read_text()


def test_a_standby_process_with_a_cluster_takes_as_much_memory_as_the_program(tmp_path, monkeypatch):
    used = standby.memory.used_bytes(os.getpid())
    assert 2**20 < used < standby.memory.total_bytes()
    monkeypatch.setattr(standby, "MEMORY_BYTES", used // 2)
    monkeypatch.setattr(standby.memory, "available_bytes", lambda: standby.RESERVE_BYTES + used // 2 + 1)
    standing_by = standby.Standby(lambda environment: pytest.fail("a standby process was started"), 0, 1, tmp_path)
    for _ in range(2):
        standing_by.keep(training=True, variables={}, like=os.getpid())
    assert standing_by.settled
