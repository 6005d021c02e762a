"""Any task may be killed in any phase: the run must succeed, and where it is synchronous with the same bits."""

import os
import signal
from collections.abc import Callable

import pytest

from cluster.contract.run.records import Heartbeat
from cluster.system.json_files import read_json
from tests.e2e.scenario import summary
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("data")]  # each time: the promises, and `test_recovery.py`

STEPS, EVERY = 60, 20
TOPOLOGIES = {"multiworker": ("--workers=1",), "ps": ("--workers=2", "--ps=1", "--evaluator")}
TASKS = {"multiworker": ("chief", "worker-0"), "ps": ("chief", "worker-0", "ps-0")}
TRAINING = ("--steps-per-loop=5", "--log-every=5", f"--max-steps={STEPS}", "--evaluate-every=30")

PHASES: dict[str, Callable[[Heartbeat], bool]] = {
    # The chief's heartbeat in each phase; changes of state are written at once.
    "start": lambda beat: beat.state == "starting",
    "compile": lambda beat: beat.state == "compiling",
    "training": lambda beat: beat.state == "training" and beat.step >= 10,
    "checkpoint": lambda beat: beat.state == "saving" and beat.step < STEPS,
    "evaluation": lambda beat: beat.state == "evaluating",
    "export": lambda beat: beat.state == "saving" and beat.step == STEPS,
}


def words(name: str, strategy: str) -> tuple[str, ...]:
    options = (f"--name={name}", "--runtime=local", "--tensorboard-port=0", f"--checkpoint-every={EVERY}")
    return ("up", *options, *TOPOLOGIES[strategy], "--", *TRAINING)


@pytest.fixture(scope="module")
def undisturbed(clusters) -> str:
    """The hash that every synchronous run must end with."""
    clusters.invoke(*words("undisturbed", "multiworker"))
    return summary(clusters.run("undisturbed"))["weights_sha256"]


@pytest.mark.parametrize(
    ("strategy", "task", "phase"),
    [(strategy, task, phase) for strategy, tasks in TASKS.items() for task in tasks for phase in PHASES],
)
def test_a_task_killed_in_any_phase_must_not_stop_the_run(clusters, request, strategy, task, phase):
    name = f"{strategy}-{task}-{phase}"
    process = clusters.popen(*words(name, strategy))
    run = clusters.run(name)

    def reached() -> bool:
        beat = run.heartbeat("chief")
        return beat is not None and run.programs(task).exists() and PHASES[phase](beat)

    wait_for(reached, f"the chief's phase {phase}", pause_s=0.001)
    os.kill(read_json(run.programs(task))["program"]["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert 0 == process.returncode, output
    ended = summary(run)
    assert ("succeeded", STEPS) == (ended["state"], ended["steps"])
    assert (run.export / "saved_model.pb").exists()
    was_done = phase == "export" and ended["tasks"][task] == 128 + signal.SIGKILL  # a worker, before the chief's export
    assert {0} == {code for name, code in ended["tasks"].items() if name != task or not was_done}
    assert strategy != "ps" or "evaluated" in {event.event for event in run.events()}
    for restart in ended["restarts"]:
        assert restart["task"] == task
        assert restart["steps_lost"] <= EVERY
    if strategy == "multiworker":
        assert (0 if was_done else 1) == len(ended["restarts"])
        assert request.getfixturevalue("undisturbed") == ended["weights_sha256"]
