"""The standby process: the next attempt's program is there before it is needed, and gone after the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.agent import standby
from cluster.runtime.local import supervisor
from cluster.system import processes
from tests.unit.gang import StartGang
from tests.waiting import wait_for

DIES_AS_STANDBY = """
import os, sys
if 'STANDBY' in os.environ:
    open(os.environ['RUN_DIR'] + '/standby', 'w').write(str(os.getpid()))
    sys.exit(3)
"""
LINES = """
(run.path / f'{NAME}.{os.getpid()}.{GENERATION}.{RESTARTS}.standby={"STANDBY" in os.environ}').touch()
train(5)
if not GENERATION: work()
train(6), meet(), finish()
"""


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARM_SPARE", "1")
    monkeypatch.setenv("WARM_SPARE_DELAY_S", "0")


def test_after_a_death_the_standby_processes_become_the_next_generation(start_gang: StartGang) -> None:
    gang = start_gang(LINES, workers=1)
    # A supervisor, and for each task its agent, its program and the standby process.
    wait_for(lambda: len(supervisor.processes_left(gang.run)) == 8, "the standby processes")
    os.kill(gang.pid("worker-0"), signal.SIGKILL)
    assert "succeeded" == gang.summary()["state"]  # and waits until every process has ended, standby ones too
    attempts = {tuple(path.name.split(".")[::2]) for path in gang.run.path.glob("*.standby=*")}
    assert {("chief", "0", "standby=False"), ("worker-0", "0", "standby=False")} <= attempts
    assert {("chief", "1", "standby=True"), ("worker-0", "1", "standby=True")} <= attempts
    assert 4 == len(attempts)
    assert [1, 1] == [gang.beat(task)["restarts"] for task in ("chief", "worker-0")]


def test_a_standby_process_that_died_is_not_used(start_gang: StartGang) -> None:
    gang = start_gang(
        LINES,
        imports=f"{DIES_AS_STANDBY}\nfrom tests.unit.trainer import *",
        workers=0,
    )
    gang.await_step("chief", 5)
    standby_id = int(wait_for(lambda: read_text(gang.run.path / "standby"), "the standby process"))
    wait_for(lambda: processes.start_ticks(standby_id) is None, "the end of the standby process")
    os.kill(gang.pid("chief"), signal.SIGKILL)
    assert "succeeded" == gang.summary()["state"]


def test_without_enough_memory_there_is_no_standby_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby.memory, "available_bytes", lambda: standby.RESERVE_BYTES)
    standing_by = standby.Standby(lambda environment: pytest.fail("a standby process was started"), 0, 1)
    standing_by.keep(training=True)
    standing_by.keep(training=True)
    assert standing_by.take() is None
