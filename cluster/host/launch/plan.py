"""The plan of a run, checked and ready to start; its output for `invoke plan`; and its estimate of memory.

TensorFlow counts the model's parameters in a separate process, see `train/startup/preflight.py`.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.contract import compatibility, tf_config
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Role, Task
from cluster.host.launch import configuration, metrics_server
from cluster.host.options.request import Request
from cluster.host.runtime import tensorboard
from cluster.host.runtime.base import Runtime, Workload
from cluster.host.runtime.resources import TASK_MEMORY_BYTES
from cluster.host.view.columns import chosen_columns, columns, plain_lines
from cluster.system import memory
from cluster.system.errors import ClusterError
from cluster.system.messages import COMMAND, counted, plain, size
from cluster.system.terminal import print_wait

BF16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags, any of which makes bf16 faster than fp32."""
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""CPU flags, all required by oneDNN's AVX-512 kernels."""


@dataclass(frozen=True, kw_only=True)
class Plan(Workload):
    """The workload of a run, its runtime and its options."""

    request: Request
    """The request as typed."""
    options: Request
    """The request with the options that it inherits from the run that it resumes or repeats."""
    runtime: Runtime
    why_runtime: str
    compose: dict[str, Any]
    config: dict[str, Any]
    data: str
    """A description of the prepared data; empty if the data must still be prepared."""
    tensorboard_port: int | None
    replaces: bool
    mirror: str = ""
    """The URL of the object store that mirrors the run, without credentials."""
    mirror_id: str = ""
    previous: RunFolder | None = None
    init: tuple[Path, ...] = ()
    about_resuming: tuple[str, ...] = ()

    @property
    def resumes(self) -> bool:
        return bool(self.request.resume)

    @property
    def notes(self) -> list[str]:
        gpus = "; ".join(f"{task} {','.join(ids)}" for task, ids in self.gpus.ids.items())
        return [*([f"GPUs: {gpus}"] if gpus else []), *self._keras_notes, *self._warnings]

    @property
    def _warnings(self) -> list[str]:
        network = [self.network.warning] if self.network.warning else []
        port = self.options.count("metrics_port")
        metrics = [f"metrics {metrics_server.address(port)}"] if port else []
        kernels = []
        if self.config.get("onednn") == "avx512" and not self.runtime.is_remote and "avx512" not in self.fast_kernels:
            kernels.append("warning: --onednn avx512, but this processor has no AVX-512, which changes weights' bits")
        return [*self.gpus.notes, *self.about_resuming, *self._elastic_notes, *kernels, *network, *metrics]

    @property
    def fast_kernels(self) -> list[str]:
        """The values to which `--onednn auto` may resolve for a user's model here, fastest first."""
        known = not self.runtime.is_remote  # the processors of other machines are unknown
        return ["avx512", "avx2"] if known and AVX512 <= processor_flags() else ["avx2"]

    @property
    def chooses_kernels(self) -> bool:
        """Whether `--onednn` depends on the operations of the user's model."""
        return self.config.get("onednn") == "auto" and bool(self.config["deterministic"])

    def choose_kernels(self, unverified: dict[str, list[str]]) -> tuple[str, list[str]]:
        """Return the value of `--onednn`, and notes on why it is not the fastest.

        `unverified` lists the model's operations whose bits may vary, keyed by the kernels' instruction set.
        """
        fastest, *slower = self.fast_kernels
        chosen = next((kernels for kernels in (fastest, *slower) if unverified.get(kernels) == []), "off")
        if chosen == fastest:
            return chosen, []
        tried = self.fast_kernels[-1] if chosen == "off" else fastest
        names = unverified.get(tried, ["operations that were not tried"])
        listed = ", ".join(names[:3]) + (", ..." if names[3:] else "")
        if chosen != "off":
            return chosen, [f"oneDNN's kernels use {chosen}, as the bits of {listed} may vary with {fastest}"]
        cost = "--onednn on can be faster, 1.6 times in the mean of six models"
        return chosen, [f"oneDNN's kernels are off, as the bits of {listed} may vary with them; {cost}"]

    @property
    def _elastic_notes(self) -> list[str]:
        if not self.elastic:
            return []
        least = counted(self.elastic["min_workers"], "worker")
        back = "join at the next checkpoint" if self.elastic["grow"] else f"wait for `{COMMAND} scale`"
        first = f"continues with {least} or more; those that miss the rendezvous are left out; returning ones {back}"
        order = "another number of workers sums in another order, which changes bits; see --bitwise-elastic"
        return [first] if self.config.get("bitwise_elastic") else [first, order]

    @property
    def _keras_notes(self) -> list[str]:
        if self.config.get("loop") == "fit":
            if self.cluster.kind.legacy_fit:
                return ["Model.fit is that of tf_keras, because Keras 3's own knows no parameter servers"]
            return ["Model.fit is that of Keras 3"]
        if not self.payload.needs_legacy_keras(self.cluster):
            return []
        why = "because Keras 3's own fit knows no parameter servers"
        return [f"tf.keras is Keras 2 (tf_keras) for the script, {why}; TF_USE_LEGACY_KERAS=0 keeps Keras 3"]

    def to_json(self) -> dict[str, Any]:
        batch, port = self.config.get("global_batch"), self.tensorboard_port
        shards = self.config.get("bitwise_elastic") or self.cluster.batch_divisor
        most = -(-shards // self.cluster.batch_divisor)  # most shards of a replica: they may be shared unevenly
        micro_batches, tasks = self.config.get("micro_batches", 1), []
        for task in self.cluster.tasks:
            gpus = [int(gpu) if gpu.isdigit() else gpu for gpu in self.gpus.of(task.name)]
            text = tf_config.render(self.cluster, task)
            tasks.append({"task": task.name, "address": task.address, "gpus": gpus, "tf_config": text})
        return {
            "run": self.run.name,
            "runtime": self.runtime.name,
            "network": self.network.name,
            "strategy": self.cluster.strategy_class,
            "replicas": self.cluster.replicas,
            "global_batch": batch,
            "replica_batch": batch and batch // shards * most,
            "micro_batches": micro_batches,
            "micro_batch": batch and batch // shards // micro_batches,
            "training": self._training(),
            "pipeline": self._pipeline(),
            "tensorboard": tensorboard.AUTO if port is None else tensorboard.address(port) if port else None,
            "tasks": tasks,
            "elastic": self.elastic or None,
            "notes": self._warnings,
            "config": self.config,
            "compose": self.compose,
        }

    def _pipeline(self) -> dict[str, Any] | None:
        if not self.cluster.kind.staged or not self.data:
            return None
        stages, micro_batches = self.cluster.stages, self.config["micro_batches"]
        bubble = (stages - 1) / (micro_batches + stages - 1)
        cut = self.try_configuration()
        del cut["record"], cut["unverified"]
        counts = {"pipelines": self.cluster.pipelines, "micro_batches": micro_batches, "bubble": bubble}
        return {**self.config["pipeline"], **counts, **cut}

    def try_configuration(self) -> dict[str, Any]:
        """Check that model, data and loss fit together; return the result of `configuration.check_config`."""
        environment = self.payload.trial_environment()
        limit, start = self.stage_memory_bytes, self.runtime.program_starter
        return configuration.check_config(self.config, self.cluster, environment, memory_bytes=limit, start=start)

    @property
    def stage_memory_bytes(self) -> int:
        """The memory limit of a stage; 0 if unknown. A stage has a GPU, or its share of the task's memory."""
        if self.gpus.memory_bytes or not self.memory.task_bytes:
            return self.gpus.memory_bytes
        return max(1, (self.memory.task_bytes - TASK_MEMORY_BYTES) // self.cluster.devices)

    def _training(self) -> dict[str, Any] | None:
        settings = self.config.get("optimizer")
        if settings is None:
            return None
        rate, rule, base_batch = settings["learning_rate"], settings["scaling"], settings["base_batch"]
        precision = compatibility.precision_of(self.cluster.strategy, self.config.get("precision", "fp32"))
        callbacks_set_rate = self.config.get("callbacks") and settings["schedule"] == "constant"
        # On CPUs only oneDNN has bf16 kernels, and only this machine's processor is known.
        on_this_processor = self.config.get("onednn") == "on" and not self.gpus.ids and not self.runtime.is_remote
        return {
            "precision": precision,
            "bf16_is_faster": precision == "fp32" and on_this_processor and not BF16.isdisjoint(processor_flags()),
            "optimizer": settings["name"],
            "learning_rate": compatibility.scale_rate(rate, rule, self.config["global_batch"], base_batch),
            "base_learning_rate": rate,
            "base_batch": None if rule == "none" else base_batch,
            "warmup_steps": 0 if callbacks_set_rate else settings["warmup_steps"],
            **{name: settings[name] for name in ("scaling", "schedule", "weight_decay", "ema", "clip_norm")},
        }


@functools.cache
def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU flags of this machine's first core."""
    with cpuinfo.open() as lines:  # reading all of it is slow on a machine with many cores
        return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the output of `invoke plan --json`, with memory and kernels if the data is ready."""
    value = plan.to_json() | {"memory": estimate_memory(plan)}
    if plan.chooses_kernels and (value["pipeline"] or "parameters" in (value["memory"] or {})):
        kernels, why = plan.choose_kernels(plan.try_configuration().get("unverified", {}))
        value |= {"config": plan.config | {"onednn": kernels}, "notes": [*value["notes"], *why]}
    return value


def plan_lines(value: dict[str, Any]) -> list[str]:
    """Format a plan as lines of text. A job's script is not wrapped, so that it can be pasted."""
    return [*_description(value), *map(plain, value["compose"].get("script", "").splitlines())]


@plain_lines
def _description(value: dict[str, Any]) -> list[str]:
    replicas = counted(value["replicas"], "replica")
    lines = [f"run {value['run']}: {value['strategy']}, {replicas}, runtime {value['runtime']}"]
    if value["global_batch"] is None:
        lines.append(f"script {' '.join([value['config']['script'], *value['config']['arguments']])}")
    else:
        parts = f", in micro-batches of {value['micro_batch']}" if value["micro_batches"] > 1 else ""
        lines.append(f"global batch {value['global_batch']}: {value['replica_batch']} a replica and step{parts}")
    if training := value["training"]:
        lines.append(_numerics(training, value["global_batch"]))
    if pipeline := value["pipeline"]:
        lines += _stages(pipeline)
    given = [f"GPU {','.join(map(str, ids))}" if (ids := task["gpus"]) else "no GPU" for task in value["tasks"]]
    rows = []
    for task, gpus in zip(value["tasks"], given, strict=True):
        text = json.dumps(task["tf_config"]) if task["tf_config"] else "no TF_CONFIG: it trains alone"
        rows.append((task["task"], task["address"], *([gpus] if set(given) != {"no GPU"} else []), text))
    lines += columns(rows)
    return [*lines, *value["notes"]]


def _stages(pipeline: dict[str, Any]) -> list[str]:
    count = pipeline["pipelines"]
    pipelines = "pipeline" if count == 1 else f"{count} pipelines"
    remat = ", activations computed again" if pipeline["remat"] else ""
    limit = f"{pipeline['memory_bytes'] / 1e6:,.0f} MB" if pipeline["memory_bytes"] else "any memory"
    head = f"{pipelines} {pipeline['schedule']}, {pipeline['micro_batches']} micro-batches{remat}: "
    head += f"stages of equal time would idle {pipeline['bubble']:.0%}; a stage may take {limit}"
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
    if training["schedule"] != "constant":
        warm += f", then {training['schedule']}"
    clip = f"clipped to norm {training['clip_norm']:g}" if training["clip_norm"] else "not clipped"
    decay = f", weight decay {training['weight_decay']:g}" if training["weight_decay"] else ""
    ema = f", weights averaged by {training['ema']:g}" if training["ema"] else ""
    precision = training["precision"] + (" (bf16 is faster on this processor)" if training["bf16_is_faster"] else "")
    return f"precision {precision}, {training['optimizer']}, {rate} {warm}, gradients {clip}{decay}{ema}"


def estimate_memory(plan: Plan) -> dict[str, Any] | None:
    """Return the memory of each task against its limit, as in `invoke plan --json`; None if it is not estimated."""
    if plan.payload.script:
        return None
    dataset = plan.config["dataset"]
    if not plan.data and ":" not in dataset:  # a user's data is never called ready, see `describe_ready`
        return {"unknown": f"{dataset} is not prepared; `{COMMAND} data.prepare --name {dataset}` or `up` does that"}
    if plan.cluster.kind.staged:
        return None
    try:
        print_wait("counting what the model holds in memory")
        sizes = configuration.measure_model(plan.config, plan.cluster, plan.payload.trial_environment())
    except ClusterError as error:
        return {"unknown": str(error)}
    return sizes | assess(plan, sizes)


def assess(plan: Plan, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of each replica and task in bytes, and whether all fit."""
    micro_batches = plan.config.get("micro_batches", 1)
    shards = plan.config.get("bitwise_elastic") or plan.cluster.batch_divisor
    examples = max(1, plan.config["global_batch"] // shards // micro_batches)
    per_replica = {
        "weights": sizes["weights_bytes"],
        "gradients": sizes["gradients_bytes"] * (2 if micro_batches > 1 else 1),  # also their sum
        "optimizer": 0 if plan.cluster.kind.served else sizes["optimizer_bytes"],
        "activations": examples * (sizes["activation_bytes"] or 0),
    }
    of_task = {task.name: _task(plan, task, sizes, sum(per_replica.values())) for task in plan.cluster.tasks}
    limit = plan.memory.task_bytes
    rooms: list[dict[str, Any]] = []
    if limit:
        rooms.append({"of": "a task", "needs": max(of_task.values()), "has": limit})
    elif not plan.runtime.is_remote:
        rooms.append({"of": "this machine", "needs": sum(of_task.values()), "has": memory.free_bytes()})
    if plan.gpus.memory_bytes:
        rooms.append({"of": "a GPU", "needs": sum(per_replica.values()), "has": plan.gpus.memory_bytes})
    fits = all(room["needs"] <= room["has"] for room in rooms) if rooms else None
    return {"replica_bytes": per_replica, "task_bytes": of_task, "rooms": rooms, "fits": fits}


def _task(plan: Plan, task: Task, sizes: dict[str, Any], replica_bytes: int) -> int:
    cluster, on_gpus = plan.cluster, plan.gpus.of(task.name) or plan.options.gpus_per_task
    if task.role == Role.PS:
        held = (sizes["weights_bytes"] + sizes["optimizer_bytes"]) // len(cluster.of(Role.PS))
    elif task.role == Role.WORKER or (task.role == Role.CHIEF and not cluster.kind.served):
        held = 0 if on_gpus else cluster.devices * replica_bytes
    else:
        held = sizes["weights_bytes"]
    if plan.config.get("memory_snapshots") and not cluster.kind.served and not task.role.is_sidecar:
        held += 2 * (sizes["weights_bytes"] + sizes["optimizer_bytes"])
    return TASK_MEMORY_BYTES + int(held)


@plain_lines
def memory_lines(value: dict[str, Any] | None) -> list[str]:
    """Format the result of `estimate_memory` as lines of text."""
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
