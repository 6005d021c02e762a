"""A plan as lines of text."""

import json
from typing import Any

from cluster.host.view.columns import chosen_columns, columns, plain_lines
from cluster.system.messages import counted, plain


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
