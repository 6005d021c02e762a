"""Will it fit? What each task of a plan holds in memory, against what it may use.

TensorFlow counts the model's parts in a separate process (`train/startup/preflight.py`). The answer is kept with
the runs: a built-in model has the same sizes until the training program changes. A user's models are always counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.contract import user_code
from cluster.contract.run import records
from cluster.contract.schema import Count, Record
from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.host.launch import folders
from cluster.host.launch.plan import Plan
from cluster.host.runtime.resources import TASK_MEMORY_BYTES
from cluster.host.view.columns import plain_lines
from cluster.system import memory
from cluster.system.errors import ClusterError
from cluster.system.files import files_sha256
from cluster.system.json_files import write_json
from cluster.system.messages import size
from cluster.system.paths import ROOT
from cluster.system.terminal import print_wait

DECIDING = ("model", "dataset", "source", "loss", "precision", "loop", "onednn", "optimizer", "transformer")
"""The parts of a configuration that the sizes depend on."""


@dataclass(frozen=True, kw_only=True)
class _Sizes(Record):
    parameters: Count
    weights_bytes: Count
    gradients_bytes: Count
    optimizer_bytes: Count
    activation_bytes: Count | None


def of(plan: Plan) -> dict[str, Any] | None:
    """Return the memory of each task against its limit, as `invoke plan --json` shows it.

    Returns:
        None for a script, and for a pipeline, whose stages `plan` shows.
    """
    if plan.payload.script or plan.cluster.kind.staged:
        return None
    if not plan.data and ":" not in plan.config["dataset"]:
        return {
            "unknown": f"{plan.config['dataset']} is not prepared; `invoke data.prepare` does that, and so does `up`"
        }
    try:
        sizes = _read(plan)
    except ClusterError as error:
        return {"unknown": str(error)}
    return sizes | assess(plan, sizes)


def assess(plan: Plan, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of each replica and task, and whether all fit."""
    per_replica = _replica(plan, sizes)
    of_task = {task.name: _task(plan.cluster, task, sizes, sum(per_replica.values())) for task in plan.cluster.tasks}
    limit = plan.memory.task_bytes
    rooms: list[dict[str, Any]] = []
    if limit:
        rooms.append({"of": "a task", "needs": max(of_task.values()), "has": limit})
    elif not plan.runtime.is_remote:
        rooms.append({"of": "this machine", "needs": sum(of_task.values()), "has": memory.available_bytes()})
    if plan.gpus.memory_bytes:
        rooms.append({"of": "a GPU", "needs": sum(per_replica.values()), "has": plan.gpus.memory_bytes})
    return {
        "replica_bytes": per_replica,
        "task_bytes": of_task,
        "rooms": rooms,
        "fits": all(room["needs"] <= room["has"] for room in rooms) if rooms else None,
    }


def _replica(plan: Plan, sizes: dict[str, Any]) -> dict[str, int]:
    micro_batches = plan.config.get("micro_batches", 1)
    shards = plan.config.get("bitwise_elastic") or plan.cluster.batch_divisor
    examples = max(1, plan.config["global_batch"] // shards // micro_batches)
    served = plan.cluster.kind.served
    return {
        "weights": sizes["weights_bytes"],
        "gradients": sizes["gradients_bytes"] * (2 if micro_batches > 1 else 1),  # and their sum
        "optimizer": 0 if served else sizes["optimizer_bytes"],
        "activations": examples * (sizes["activation_bytes"] or 0),
    }


def _task(cluster: ClusterSpec, task: Task, sizes: dict[str, Any], replica_bytes: int) -> int:
    if task.role == Role.PS:
        held = (sizes["weights_bytes"] + sizes["optimizer_bytes"]) // len(cluster.of(Role.PS))
    elif task.role == Role.WORKER or (task.role == Role.CHIEF and not cluster.kind.served):
        held = cluster.devices * replica_bytes
    else:
        held = sizes["weights_bytes"]
    return TASK_MEMORY_BYTES + int(held)


def _read(plan: Plan) -> dict[str, Any]:
    deciding = {name: plan.config.get(name) for name in DECIDING}
    own = ":" in json.dumps([plan.config.get("model"), plan.config.get("dataset")]) or plan.payload.requirements
    program = files_sha256(ROOT / "train", _modules())
    key = json.dumps([deciding, plan.cluster.strategy, plan.data, program], sort_keys=True)
    path = folders.runs_dir() / ".footprints" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if not own and (kept := records.read(path, _Sizes.from_json, None)):
        return replace(kept, unknown={}).to_json()
    words = ["--config", json.dumps(plan.config), "--strategy", plan.cluster.strategy]
    words += ["--data-dir", str(folders.data_dir())]
    print_wait("counting what the model holds in memory, once")
    sizes = _Sizes.from_json(
        user_code.run(
            [sys.executable, "-m", "train.startup.preflight", "--memory", *words],
            f"--model {plan.config['model']!r}",
            "PRESET_TIMEOUT_S",
            cwd=ROOT,
            environment=os.environ | {"PYTHONPATH": os.pathsep.join(plan.payload.local_path())},
        )
    )
    value = replace(sizes, unknown={}).to_json()
    if not own:
        write_json(path, value, durable=False)
    return value


def _modules() -> Iterator[str]:
    folder = ROOT / "train"
    yield from sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))


@plain_lines
def lines(value: dict[str, Any] | None) -> list[str]:
    """Return it as lines of text."""
    if value is None:
        return []
    if "unknown" in value:
        return [f"memory: not known ({value['unknown']})"]
    parts = ", ".join(f"{name} {size(held)}" for name, held in value["replica_bytes"].items() if held)
    about = "" if value["activation_bytes"] is not None else "; its activations are not known"
    text = [f"memory of a replica: {value['parameters']:,} parameters; {parts}{about}"]
    for room in value["rooms"]:
        verdict = "fits" if room["needs"] <= room["has"] else "does NOT fit"
        more = "" if room["needs"] <= room["has"] else "; use --micro-batches, a smaller batch or fewer tasks"
        of_what = "all tasks together" if room["of"] == "this machine" else room["of"]
        text.append(f"{verdict}: {of_what} about {size(room['needs'])} of {size(room['has'])}{more}")
    return text
