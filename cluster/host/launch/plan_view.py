"""A plan as lines of text, and what each of its tasks holds in memory, against what it may use.

TensorFlow counts the model's parts in a separate process, see `train/startup/preflight.py`.
"""

import json
from typing import Any

from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.host.launch import configuration
from cluster.host.launch.plan import Plan
from cluster.host.runtime.resources import TASK_MEMORY_BYTES
from cluster.host.view.columns import chosen_columns, columns, plain_lines
from cluster.system import memory
from cluster.system.errors import ClusterError
from cluster.system.messages import COMMAND, counted, plain, size
from cluster.system.terminal import print_wait


def plan_lines(value: dict[str, Any]) -> list[str]:
    """Return a plan as lines of text. A job's script is not wrapped, so that it can be pasted."""
    return [*_description(value), *map(plain, value.get("compose", {}).get("script", "").splitlines())]


@plain_lines
def _description(value: dict[str, Any]) -> list[str]:
    replicas = counted(value["replicas"], "replica")
    lines = [f"run {value['run']}: {value['strategy']}, {replicas}, runtime {value['runtime']}"]
    if value["global_batch"] is None:
        lines.append(f"script {' '.join([value['config']['script'], *value['config']['arguments']])}")
    else:
        parts = f", in micro-batches of {value['micro_batch']}" if value["micro_batches"] > 1 else ""
        lines.append(f"global batch {value['global_batch']}: {value['replica_batch']} a replica and step{parts}")
    if training := value.get("training"):
        lines.append(_numerics(training, value["global_batch"]))
    if pipeline := value.get("pipeline"):
        lines += _stages(pipeline)
    given = [f"GPU {','.join(map(str, ids))}" if (ids := task.get("gpus")) else "no GPU" for task in value["tasks"]]
    rows = [
        (
            task["task"],
            task["address"],
            *([gpus] if set(given) != {"no GPU"} else []),
            json.dumps(task["tf_config"]) if task["tf_config"] else "no TF_CONFIG: it trains alone",
        )
        for task, gpus in zip(value["tasks"], given, strict=True)
    ]
    lines += columns(rows)
    return [*lines, *value.get("notes", [])]


def _stages(pipeline: dict[str, Any]) -> list[str]:
    count = pipeline["pipelines"]
    pipelines = "pipeline" if count == 1 else f"{count} pipelines"
    remat = ", activations computed again" if pipeline["remat"] else ""
    limit = f"{pipeline['memory_bytes'] / 1e6:,.0f} MB" if pipeline["memory_bytes"] else "any memory"
    head = (
        f"{pipelines} {pipeline['schedule']}, {pipeline['micro_batches']} micro-batches{remat}: stages of equal time "
        f"would idle {pipeline['bubble']:.0%}; a stage may take {limit}"
    )
    names = ("STAGE", "PARAMETERS", "STATE MB", "MB/MICRO-BATCH", "HELD", "HELD MB", "TIME", "FLOPS", "LAYERS")
    rows = [
        (
            stage["stage"],
            f"{stage['parameters']:,}",
            f"{stage['state_bytes'] / 1e6:,.1f}",
            f"{stage['micro_batch_bytes'] / 1e6:,.1f}",
            stage["in_flight"],
            f"{stage['activation_bytes'] / 1e6:,.1f}",
            f"{stage['share']:.0%}",
            f"{stage['cost']:.3g}",
            f"{stage['first']} to {stage['last']}",
        )
        for stage in pipeline["stages"]
    ]
    spare = ("MB/MICRO-BATCH", "STATE MB", "FLOPS", "HELD", "PARAMETERS")
    return [head, *chosen_columns(names, rows, right=names[:-1], spare=spare)]


def _numerics(training: dict[str, Any], batch: int) -> str:
    rate = f"learning rate {training['learning_rate']:g}"
    if training["scaling"] != "none":
        ratio = f"{batch}/{training['base_batch']}"
        by = f"sqrt({ratio})" if training["scaling"] == "sqrt" else ratio
        rate += f" ({training['scaling']}: {training['base_learning_rate']:g} x {by})"
    warm = f"after {counted(training['warmup_steps'], 'step')} of warm-up" if training["warmup_steps"] else "at once"
    if (schedule := training.get("schedule", "constant")) != "constant":
        warm += f", then {schedule}"
    clip = f"clipped to norm {training['clip_norm']:g}" if training["clip_norm"] else "not clipped"
    decay = f", weight decay {training['weight_decay']:g}" if training.get("weight_decay") else ""
    ema = f", weights averaged by {training['ema']:g}" if training.get("ema") else ""
    precision = training["precision"] + (
        " (bf16 is faster on this processor)" if training.get("bf16_is_faster") else ""
    )
    return f"precision {precision}, {training['optimizer']}, {rate} {warm}, gradients {clip}{decay}{ema}"


def estimate_memory(plan: Plan) -> dict[str, Any] | None:
    """Return the memory of each task against its limit, as `invoke plan --json` shows it.

    Returns:
        None for a script, and for a pipeline, whose stages `plan` shows.
    """
    if plan.payload.script or plan.cluster.kind.staged:
        return None
    if not plan.data and ":" not in plan.config["dataset"]:  # your own is never called ready, see `describe_ready`
        return {
            "unknown": f"{plan.config['dataset']} is not prepared; `{COMMAND} data.prepare` does that, and so does `up`"
        }
    try:
        print_wait("counting what the model holds in memory")
        sizes = configuration.count_memory(plan.config, plan.cluster, plan.payload.local_path())
    except ClusterError as error:
        return {"unknown": str(error)}
    return sizes | assess(plan, sizes)


def assess(plan: Plan, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of each replica and task, and whether all fit."""
    per_replica = _replica(plan, sizes)
    snapshots, needs = bool(plan.config.get("memory_snapshots")), sum(per_replica.values())
    of_task = {task.name: _task(plan.cluster, task, sizes, needs, snapshots=snapshots) for task in plan.cluster.tasks}
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


def _task(cluster: ClusterSpec, task: Task, sizes: dict[str, Any], replica_bytes: int, *, snapshots: bool) -> int:
    if task.role == Role.PS:
        held = (sizes["weights_bytes"] + sizes["optimizer_bytes"]) // len(cluster.of(Role.PS))
    elif task.role == Role.WORKER or (task.role == Role.CHIEF and not cluster.kind.served):
        held = cluster.devices * replica_bytes
    else:
        held = sizes["weights_bytes"]
    if snapshots and not cluster.kind.served and not task.role.is_sidecar:
        held += 2 * (sizes["weights_bytes"] + sizes["optimizer_bytes"])
    return TASK_MEMORY_BYTES + int(held)


@plain_lines
def memory_lines(value: dict[str, Any] | None) -> list[str]:
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
