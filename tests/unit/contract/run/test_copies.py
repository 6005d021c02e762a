"""Copies of a task: an older one claims nothing, connects to nobody and deletes no checkpoint of the newer one."""

import pytest

from cluster.agent import hub as hub_module
from cluster.agent.run_view import RunView
from cluster.contract.run import copies
from cluster.contract.run.copies import Superseded, TaskCopy
from tests.support.waiting import wait_for


def test_the_newest_copy_counts(run):
    older, other = TaskCopy.register(run, "worker-0"), TaskCopy.register(run, "chief")
    older.require_newest()
    newer = TaskCopy.register(run, "worker-0")
    assert (True, False, False) == (older.is_superseded, newer.is_superseded, other.is_superseded)
    for record in (run.control / "copies").iterdir():
        record.write_text("")  # damaged, it ends nobody
    assert not older.is_superseded


def test_an_agent_knows_its_copy_by_its_environment(run, monkeypatch):
    monkeypatch.delenv(copies.VARIABLE, raising=False)
    assert TaskCopy.from_environment(run, "worker-0") is None
    copy = TaskCopy.register(run, "worker-0")
    for name, value in copy.environment.items():
        monkeypatch.setenv(name, value)
    assert copy == TaskCopy.from_environment(run, "worker-0")


@pytest.mark.parametrize(
    "claim",
    [
        lambda board: board.begin_generation(1, task="worker-0"),
        lambda board: board.end("failed", task="worker-0"),
        lambda board: board.request_stop("worker-0"),
        lambda board: board.require_newest(),
    ],
)
def test_an_older_copy_claims_nothing(run, claim):
    older = RunView(run, TaskCopy.register(run, "worker-0"))
    newer = RunView(run, TaskCopy.register(run, "worker-0"))
    with pytest.raises(Superseded):
        claim(older)
    assert (0, None, False) == (run.generation, run.outcome, run.stop_requested)
    claim(newer)


def test_an_older_copy_does_not_take_the_newer_one_s_connection(run, monkeypatch):
    monkeypatch.setattr(hub_module, "RETRY_S", 0.05)
    spec = run.load_cluster()
    chief, older = RunView(run), RunView(run, TaskCopy.register(run, "worker-0"))
    chief.connect(spec, spec.task("chief"), "127.0.0.1")
    newer = RunView(run, TaskCopy.register(run, "worker-0"))
    newer.connect(spec, spec.task("worker-0"), "127.0.0.1")
    try:
        wait_for(lambda: newer._link.fresh, "the newer copy's connection")
        older.connect(spec, spec.task("worker-0"), "127.0.0.1")  # as one whose connection broke does again
        wait_for(lambda: not older._link._thread.is_alive(), "the end of its attempts")
        assert newer._link._thread.is_alive()
    finally:
        for board in (older, newer, chief):
            board.disconnect()
