"""Real agents with fake trainers: what the table of decisions (test_decide.py) and the simulation cannot show."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cluster.agent import agent
from cluster.agent.attempt import GRACE_S
from cluster.agent.run_view import RunView
from cluster.contract import spec
from cluster.contract.recovery.attempt_limits import PROGRAM_FAILURE
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S
from cluster.system.errors import EXIT_BUG, EXIT_CANCELLED
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat, save


def test_a_program_that_fails_before_the_start_fails_the_run_at_once(start_gang):
    gang = start_gang("sys.exit('a wrong installation')", imports="import sys", absent=("worker-0",), workers=1)
    outcome = gang.outcome()  # long before the rendezvous' end
    cause = ("failed", "chief", 1, "exit code 1, last line: a wrong installation")
    assert cause == (outcome.state, outcome.task, outcome.exit_code, outcome.error)


@pytest.mark.parametrize("culprit", ["chief", "worker-0"])
def test_a_cancelled_step_is_the_tasks_own_failure_unless_another_reports_one(start_gang, culprit):
    gang = start_gang(
        f"""
train(3)
meet()
if GENERATION:
    finish()
if NAME == "chief":
    sys.exit({EXIT_CANCELLED})
if {culprit!r} == "chief":
    work()
until((run.control / "ends" / "0-chief.json").exists)
sys.exit({EXIT_BUG})
""",
        workers=1,
    )
    assert [culprit] == [restart["task"] for restart in gang.summary()["restarts"]]
    assert [PROGRAM_FAILURE] == [record.kind for record in gang.run.generations() if record.task]


def test_a_task_that_comes_after_the_end_does_not_hold_it_up(run, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the agents run in this very process
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the summary waits for a task that never ran"))
    run.end("stopped", task="chief")
    for task in ("worker-0", "chief"):
        agent.Agent(RunView(run), task, ["false"], rendezvous_timeout_s=1).main()
    assert {"chief": None, "worker-0": None} == read_json(run.summary)["tasks"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "RUN_DIR and TASK not set: an agent is started by `invoke up`"),
        ({"TASK": "worker-1"}, "no task 'worker-1' in this cluster; did you mean 'worker-0'?"),
        ({"TASK": "chief", "TF_CONFIG": "{}"}, "TF_CONFIG '{}'"),
    ],
)
def test_an_agent_that_was_started_wrongly_says_so_in_one_line(make_run, environment, message):
    run = {"RUN_DIR": str(make_run(workers=1).path)} if environment else {}
    command = [sys.executable, "-m", "cluster.agent"]
    done = subprocess.run(command, env=os.environ | run | environment, capture_output=True, text=True, timeout=300)
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith(f"error: {message}")
    assert 1 == len(done.stderr.splitlines())


def test_a_task_of_slurm_listens_on_all_addresses_as_its_name_may_be_that_of_the_loopback(run, monkeypatch):
    write_json(run.path / "placed.json", spec.build(1).to_json())
    monkeypatch.setenv("CLUSTER_JSON", str(run.path / "placed.json"))
    assert "0.0.0.0" == agent.Agent(RunView(run), "chief", [], 1.0)._listener.host


@pytest.mark.parametrize(
    ("state", "saved", "then", "grace_s"),
    [
        *((state, [5], "", 10 * HANG_TIMEOUT_S) for state in ("evaluating", "starting")),
        *(("starting", [], "", 1), ("evaluating", [5], "scale", GRACE_S)),
    ],
)
def test_an_evaluator_gets_as_long_for_the_last_checkpoint_as_for_a_save_unless_the_run_continues(
    make_run, state, saved, then, grace_s
):
    run = make_run(workers=0, evaluator=True)
    save(run, *saved)
    beat(run, "evaluator", state)
    run.request_stop("a test", then=then)
    run.end("stopped")
    assert grace_s == agent.Agent(RunView(run), "evaluator", [], 1.0)._attempt_in(0).grace_s
