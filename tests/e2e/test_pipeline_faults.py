"""What may surround a pipeline: standby processes, an evaluator, containers. The bits are those of one device."""

from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from tests.e2e.scenario import Clusters, summary
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("data")]

ENDLESS = 100_000
TRAINING = ("--steps-per-loop=5", "--log-every=5", "--evaluate-every=100000", "--epochs=10000", "--threads=1")
PIPELINE = ("--strategy=pipeline", "--stages=3", "--schedule=1f1b")


def up(name: str, *options: str, steps: int = ENDLESS) -> tuple[str, ...]:
    before = ("up", f"--name={name}", "--tensorboard-port=0", "--checkpoint-every=10", "--micro-batches=4", *options)
    return (*before, "--", *TRAINING, f"--max-steps={steps}")


def check_against_one_device(clusters: Clusters, run: RunFolder) -> None:
    """Check the weights of a stopped run against those of one device after as many steps."""
    name, ended = f"alone-{run.name}", summary(run)
    clusters.invoke(*up(name, "--runtime=local", "--workers=0", steps=ended["steps"]))
    assert ended["weights_sha256"] == summary(clusters.run(name))["weights_sha256"]


def programs(run: RunFolder) -> dict[str, int]:
    tasks = [task.name for task in run.load_cluster().members]
    return {task: read_json(run.programs(task))["program"]["pid"] for task in tasks if run.programs(task).exists()}


def standby_of(run: RunFolder, task: str) -> set[int]:
    """Return the standby process of a task: its agent's child other than its program."""
    pids = {which: value["pid"] for which, value in read_json(run.programs(task)).items()}
    children = Path(f"/proc/{pids['agent']}/task/{pids['agent']}/children").read_text()
    return {int(pid) for pid in children.split()} - {pids["program"]}


def test_a_standby_process_must_take_the_place_of_a_killed_stage_while_an_evaluator_runs(clusters):
    warm = Clusters(clusters.runs_dir, {"STANDBY_DELAY_S": "0"})  # so that the test does not wait for them
    warm.invoke(*up("warm", "--runtime=local", *PIPELINE, "--evaluator", "--detach"))
    run = clusters.run("warm")

    def standing_by() -> bool:
        before = programs(run)
        return len(before) == 3 and run.saved_steps != [] and all(standby_of(run, task) for task in before)

    wait_for(standing_by, "a standby process of each stage", 120)
    waiting = {task: standby_of(run, task) for task in programs(run)}
    clusters.invoke("chaos", "kill", "worker-0", "--run=warm")
    assert {task: {pid} for task, pid in programs(run).items()} == waiting
    clusters.invoke("stop", "warm")
    check_against_one_device(clusters, run)
    evaluated = [event for event in run.events() if event.event == "evaluated"]
    assert summary(run)["steps"] == evaluated[-1].step


@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_stages_in_containers_must_outlive_a_killed_one(clusters):
    clusters.invoke(*up("contained", "--runtime=docker", *PIPELINE, "--detach"), timeout_s=400)
    run = clusters.run("contained")
    wait_for(lambda: run.saved_steps != [], "a checkpoint", 120)
    clusters.invoke("chaos", "kill", "worker-0", "--run=contained")
    clusters.invoke("stop", "contained")
    assert ["worker-0"] == [restart["task"] for restart in summary(run)["restarts"]]
    check_against_one_device(clusters, run)
