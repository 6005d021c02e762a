"""Records that the tasks of a run leave."""

import time
from collections.abc import Callable
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json

MakeRun = Callable[..., RunFolder]


def beat(run: RunFolder, task: str, state: str = "training", *, age_s: float = 0, **values: Any) -> None:
    """Leave a heartbeat that is so old."""
    known = {"task": task, "role": task.partition("-")[0], "state": state, "generation": 0, "step": 0}
    rest = {"examples_per_s": None, "loss": None, "restarts": 0, "updated_at": time.time() - age_s}
    write_json(run.status(task), known | rest | values)


def save(run: RunFolder, *steps: int) -> None:
    """Leave records of checkpoints."""
    for step in steps:
        write_json(run.checkpoints / f"ckpt-{step}.json", {"step": step, "files": {}})
