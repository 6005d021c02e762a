"""Writes the records of a run's tasks, for tests that run no tasks."""

import time
from typing import Any

from cluster.agent.attempt import Restarter
from cluster.agent.run_view import RunView
from cluster.contract.results import summary
from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json

LEDGER: dict[str, Any] = {
    "generation": 0,
    "began": 1.0,
    "first_step_at": 1.0,
    "first": 0,
    "updated_at": 1.0,
    "step": 1,
    "timed_steps": 1,
    "seconds": {"input": 0.0, "compute": 4.0, "save": 1.0, "evaluate": 0.0},
}
"""The chief's ledger of one generation."""


def beat(run: RunFolder, task: str, state: str = "training", *, age_s: float = 0, **values: Any) -> None:
    """Write a heartbeat of a task that is `age_s` old."""
    known = {"task": task, "role": task.partition("-")[0], "state": state, "generation": 0, "step": 0}
    rest = {"examples_per_s": None, "loss": None, "restarts": 0, "updated_at": time.time() - age_s}
    write_json(run.status(task), known | rest | values)


def beat_all(run: RunFolder, state: str = "training", **values: Any) -> RunFolder:
    """Write a heartbeat of every task."""
    for task in run.load_cluster().tasks:
        beat(run, task.name, state, **values)
    return run


def save(run: RunFolder, *steps: int) -> None:
    for step in steps:
        write_json(run.checkpoints / f"ckpt-{step}.json", {"step": step, "files": {}})


def restarter_of(run: RunFolder, task: str = "chief") -> Restarter:
    spec = run.load_cluster()
    return Restarter(RunView(run), spec, spec.task(task))


def end(run: RunFolder, state: str, **cause: Any) -> dict[str, Any]:
    run.end(state, **cause)
    return summary.write_summary(run, settle_s=0).to_json()
