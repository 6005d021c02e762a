"""How often the agents start again what fails: by itself a few times, killed from outside for ever, stopped at once."""

import os
import signal
import socket
import time
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Generation
from tests.support.gang import Gang
from tests.support.waiting import wait_for

LONG_PAUSE_S = "30"
SERVERS_SERVE = "if NAME.startswith(('worker', 'ps')): serve()\n"


def restarts(summary: dict[str, Any]) -> list[tuple[int, str]]:
    return [(restart["generation"], restart["task"]) for restart in summary["restarts"]]


def record(run: RunFolder, generation: int) -> Generation:
    return run.generations()[generation]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("die(11)", "exit code 139 (SIGSEGV: crashed in native code)"),
        ("os._exit(0)", "ended with exit code 0 before it was done"),
    ],
)
def test_a_program_that_fails_at_one_step_again_and_again_fails_the_run(start_gang, end, error):
    lines = "if NAME == 'chief': work()\ntrain(5)\nprint('step 5', flush=True)\n"
    summary = start_gang(lines + end, workers=1).summary()
    error = f"failed 4 times without progress after step 5: {error}"
    assert "failed" == summary["state"]
    assert {"task": "worker-0", "exit_code": 1, "step": 5, "error": error}.items() <= summary["cause"].items()
    assert [(1, "worker-0"), (2, "worker-0"), (3, "worker-0")] == restarts(summary)


def test_kills_from_outside_at_one_step_do_not_end_the_run(start_gang):
    lines = "if GENERATION < 2 and NAME == 'chief': work()\ntrain(5)\nif GENERATION < 2: die()\nmeet(), finish()"
    gang = start_gang(lines, workers=1, max_restarts=0)
    summary = gang.summary()
    assert ("succeeded", 2) == (summary["state"], len(summary["restarts"]))
    assert {("external", 5, 0.0)} == {(g.kind, g.last_step, g.pause_s) for g in gang.run.generations() if g.task}


def test_kills_at_one_step_that_never_end_fail_the_run(start_gang):
    gang = start_gang("train(5), die()", workers=0, elastic={"max_external_restarts": 2})
    summary = gang.summary()
    assert ("failed", 2) == (summary["state"], gang.run.generation)
    cause = summary["cause"]
    assert ("chief", 5) == (cause["task"], cause["step"])
    for known in ("3 times", socket.gethostname(), "SIGKILL"):
        assert known in cause["error"]


def test_a_worker_of_parameter_servers_that_cannot_work_fails_the_run(start_gang):
    lines = "if NAME == 'worker-0': sys.exit(70)\n" + SERVERS_SERVE + "train(3), work()"
    gang = start_gang(lines, workers=2, ps=1)
    summary = gang.summary()
    assert ("failed", "worker-0", 0) == (summary["state"], summary["cause"]["task"], gang.run.generation)
    assert 3 == len(gang.events("restarted"))


def test_a_worker_of_parameter_servers_that_is_killed_comes_back_however_often(start_gang):
    lines = "if NAME == 'worker-0' and RESTARTS < 2: die()\n" + SERVERS_SERVE
    lines += "train(3), until(lambda: (beat := run.heartbeat('worker-0')) and beat.restarts == 2), meet(), finish()"
    gang = start_gang(lines, workers=1, ps=1, max_restarts=0)
    assert ("succeeded", 0) == (gang.summary()["state"], gang.run.generation)


def test_a_server_that_ends_with_0_has_failed(start_gang):
    lines = "if NAME == 'ps-0' and not GENERATION: sys.exit(0)\n" + SERVERS_SERVE
    gang = start_gang(lines + "if not GENERATION: work()\ntrain(3), meet(), finish()", workers=1, ps=1)
    summary = gang.summary()
    assert ("succeeded", [(1, "ps-0")]) == (summary["state"], restarts(summary))
    assert "ended with exit code 0 before it was done" == summary["restarts"][0]["cause"]


def test_an_abort_that_follows_from_another_crash_is_not_the_culprit(start_gang):
    lines = """
train(3)
if GENERATION: meet(), finish()
if NAME == 'worker-0': meet(), die(6)
until(lambda: (run.control / 'ends' / '0-worker-0.json').exists())
die(11)
"""
    gang = start_gang(lines, workers=1)
    assert [(1, "chief")] == restarts(gang.summary())
    assert "program failure" == record(gang.run, 1).kind


# Pauses


@pytest.fixture
def long_pause(monkeypatch):
    monkeypatch.setenv("RESTART_PAUSE_S", LONG_PAUSE_S)


def pausing(gang: Gang, task: str) -> bool:
    return gang.beat(task).state == "restarting"


@pytest.mark.usefixtures("long_pause")
def test_a_stop_ends_a_pause_of_the_gang(start_gang):
    gang = start_gang("train(5), die(11)", workers=1)
    wait_for(lambda: pausing(gang, "chief") and pausing(gang, "worker-0"), "the pause of both")
    began = time.monotonic()
    gang.run.request_stop("a test")
    assert "stopped" == gang.summary()["state"]
    assert time.monotonic() - began < float(LONG_PAUSE_S) / 2


@pytest.mark.usefixtures("long_pause")
def test_a_stop_ends_a_pause_of_the_evaluator(start_gang):
    gang = start_gang("if NAME == 'evaluator': sys.exit('no data')\ntrain(3), work()", workers=0, evaluator=True)
    wait_for(lambda: pausing(gang, "evaluator") and gang.beat("chief").step == 3, "the evaluator's pause")
    began = time.monotonic()
    gang.run.request_stop("a test")
    assert ("stopped", 0) == (gang.summary()["state"], gang.summary()["tasks"]["chief"])
    assert time.monotonic() - began < float(LONG_PAUSE_S) / 2


@pytest.mark.usefixtures("long_pause")
def test_a_stop_brings_back_a_worker_that_the_chief_saves_with(start_gang):
    lines = """
if NAME == 'worker-0' and not RESTARTS: until(lambda: run.newest_step == 3), sys.exit(70)
if NAME != 'chief': serve()
train(3), until(lambda: run.heartbeats()['worker-0'].state == 'training', timeout_s=300), work()
"""
    gang = start_gang(lines, workers=1, ps=1)
    wait_for(lambda: pausing(gang, "worker-0") and gang.beat("chief").step == 3, "the worker's pause")
    gang.run.request_stop("a test")
    summary = gang.summary()
    assert ("stopped", 3, 0) == (summary["state"], summary["steps"], summary["tasks"]["chief"])


# A task that is killed with its agent


@pytest.mark.parametrize(("task", "topology"), [("worker-0", {"workers": 1}), ("worker-0", {"workers": 1, "ps": 1})])
def test_a_task_that_comes_back_waits_for_its_port(start_gang, task, topology):
    lines = "if NAME.startswith(('worker', 'ps')) and PS: serve()\ntrain(5)\n"
    lines += "until(lambda: (run.path / 'enough').exists()), meet(), finish()"
    gang = start_gang(f"PS = {'ps' in topology}\n{lines}", **topology)
    wait_for(lambda: gang.beat(task).state == "training" and gang.beat("chief").step == 5, "the training")
    restarts_before = int(gang.beat(task).restarts)
    port = gang.run.load_cluster().task(task).port
    os.kill(gang.pid(task, "agent"), signal.SIGKILL)
    holder = wait_for(lambda: held(port), "the port", pause_s=0.0001)  # as a killed program does for a while
    with holder:
        wait_for(lambda: gang.beat(task).obstacle, "the task that waits for its port")
    wait_for(
        lambda: gang.beat(task).restarts > restarts_before and gang.beat(task).state == "training",
        "its next attempt",
    )
    (gang.run.path / "enough").touch()
    assert "succeeded" == gang.summary()["state"]


def held(port: int) -> socket.socket | None:
    """Return a listener on a port of this machine; None while somebody else has it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("127.0.0.1", port))
        holder.listen()
    except OSError:
        holder.close()
        return None
    return holder


def test_a_task_that_is_frozen_with_its_agent_is_the_culprit(start_gang):
    lines = """
train(5)
if GENERATION: meet(), finish()
if NAME == 'worker-0': work()
until(lambda: (run.path / 'frozen').exists())
sys.exit(75)
"""
    gang = start_gang(lines, workers=1, max_restarts=0)
    gang.await_step("worker-0", 5)
    frozen = [gang.pid("worker-0", of) for of in ("agent", "program")]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    (gang.run.path / "frozen").touch()
    wait_for(lambda: gang.run.generation, "the next generation", timeout_s=15)
    for pid in reversed(frozen):  # the agent, once it goes on, ends the program
        os.kill(pid, signal.SIGCONT)
    assert ("succeeded", [(1, "worker-0")]) == (gang.summary()["state"], restarts(gang.summary()))
    assert "external" == record(gang.run, 1).kind
