"""The warm spare: the next life's program is there before it is needed, and gone after the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.agent import standby
from cluster.runtime import supervisor
from cluster.system import processes
from tests.unit.gang import StartGang
from tests.waiting import wait_for

DIES_AS_A_SPARE = """
import os, sys
if 'STANDBY' in os.environ:
    open(os.environ['RUN_DIR'] + '/spare', 'w').write(str(os.getpid()))
    sys.exit(3)
"""
LINES = """
(run.path / f'{NAME}.{os.getpid()}.{GENERATION}.{RESTARTS}.spare={"STANDBY" in os.environ}').touch()
train(5)
if not GENERATION: work()
train(6), meet(), finish()
"""


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARM_SPARE", "1")
    monkeypatch.setenv("WARM_SPARE_DELAY_S", "0")


def test_after_a_death_the_spares_go_on_as_the_next_generation(start_gang: StartGang) -> None:
    gang = start_gang(LINES, workers=1)
    # A supervisor, and for each task its agent, its program and the spare.
    wait_for(lambda: len(supervisor.processes_left(gang.run)) == 8, "the spares")
    os.kill(gang.pid("worker-0"), signal.SIGKILL)
    assert "succeeded" == gang.summary()["state"]  # and waits until every process has ended, spares too
    lives = {tuple(path.name.split(".")[::2]) for path in gang.run.path.glob("*.spare=*")}
    assert {("chief", "0", "spare=False"), ("worker-0", "0", "spare=False")} <= lives
    assert {("chief", "1", "spare=True"), ("worker-0", "1", "spare=True")} <= lives
    assert 4 == len(lives)
    assert [1, 1] == [gang.beat(task)["restarts"] for task in ("chief", "worker-0")]


def test_a_spare_that_died_is_not_used(start_gang: StartGang) -> None:
    gang = start_gang(
        LINES,
        imports=f"{DIES_AS_A_SPARE}\nfrom tests.unit.trainer import *",
        workers=0,
    )
    gang.await_step("chief", 5)
    spare_id = int(wait_for(lambda: read_text(gang.run.path / "spare"), "the spare"))
    wait_for(lambda: processes.start_ticks(spare_id) is None, "the end of the spare")
    os.kill(gang.pid("chief"), signal.SIGKILL)
    assert "succeeded" == gang.summary()["state"]


def test_where_memory_is_short_there_is_no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby.memory, "available_bytes", lambda: standby.RESERVE_BYTES)
    kept = standby.Standby(lambda environment: pytest.fail("a spare was started"), 0, 1)
    kept.keep(training=True)
    kept.keep(training=True)
    assert kept.take() is None
