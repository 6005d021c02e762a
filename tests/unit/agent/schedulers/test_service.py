"""The first process of a Swarm's task: one copy of each task, and what the Swarm starts again."""

import signal
import sys
import threading

import pytest

from cluster.agent.schedulers import lifecycle, service
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.records import AfterStop
from cluster.system.errors import EXIT_DONE, EXIT_PEER_LOST, TimedOut
from tests.support.waiting import wait_for

ENDLESS = "import time\nopen({!r}, 'w')\nwhile True: time.sleep(0.01)"


def agent(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def stopped(run: RunFolder, then: str) -> None:
    run.request_stop("worker-0", then=then)
    run.end("stopped", task="chief")


@pytest.mark.parametrize(("then", "code"), [(AfterStop.REQUEUE, EXIT_PEER_LOST), ("", EXIT_DONE)])
def test_only_a_run_that_is_to_continue_starts_again(run, then, code):
    stopped(run, then)
    assert code == service.run_copy(agent(""), run, TaskCopy.register(run, "chief"))


def test_an_agent_that_was_killed_is_started_again_by_the_swarm(run):
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert 137 == service.run_copy(agent(kill), run, TaskCopy.register(run, "chief"))


def test_an_older_copy_of_a_task_ends_without_stopping_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "COPY_S", 0.02)
    begun = tmp_path / "begun"
    older = TaskCopy.register(run, "worker-0")
    assert not older.is_superseded

    def start_another() -> None:
        wait_for(begun.exists, "the agent")
        TaskCopy.register(run, "worker-0")

    other = threading.Thread(target=start_another)
    other.start()
    assert EXIT_DONE == service.run_copy(agent(ENDLESS.format(str(begun))), run, older)
    other.join()
    assert not run.stop_requested


def test_the_chief_opens_a_run_that_stopped_for_a_host(run, monkeypatch):
    monkeypatch.setattr(service.summary, "SETTLE_S", 0.0)
    monkeypatch.setenv("RENDEZVOUS_TIMEOUT_S", "0.1")
    stopped(run, AfterStop.REQUEUE)
    with pytest.raises(TimedOut):
        service.await_reopening(run, "worker-0")
    service.await_reopening(run, "chief")
    service.await_reopening(run, "worker-0")
    assert (None, False, 1) == (run.outcome, run.stop_requested, run.generation)


def test_a_run_that_stopped_for_good_stays_stopped(run):
    stopped(run, "")
    service.await_reopening(run, "chief")
    assert (True, 0) == (run.outcome is not None, run.generation)


def test_secrets_are_variables_of_the_agent(tmp_path):
    (tmp_path / "A_KEY").write_text("precious\n")
    (tmp_path / "..data").mkdir()
    assert {"A_KEY": "precious\n"} == service.secret_variables(tmp_path)
