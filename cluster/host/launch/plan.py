"""A run that was checked and can be started, and how it is shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.contract import compatibility, tf_config
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import configuration, metrics_server
from cluster.host.options.request import Request
from cluster.host.runtime import tensorboard
from cluster.host.runtime.base import Runtime, Workload
from cluster.host.runtime.resources import TASK_MEMORY_BYTES
from cluster.system.messages import COMMAND, counted


@dataclass(frozen=True, kw_only=True)
class Plan(Workload):
    """What is started, on which runtime, and how it is looked after."""

    request: Request
    runtime: Runtime
    why_runtime: str
    """In words what runs the tasks, and why."""
    compose: dict[str, Any]
    """What the runtime makes of it, as saved in `compose.json`."""
    config: dict[str, Any]
    data: str
    """In words what is prepared of its data; empty where something must be."""
    tensorboard_port: int | None
    metrics_port: int
    hang_timeout_s: int
    max_restarts: int
    max_external_restarts: int
    replaces: bool
    mirror: str = ""
    """The URL of the object store that mirrors it, without credentials."""
    mirror_id: str = ""
    """What marks the run's files there."""
    previous: RunFolder | None = None
    """The run that is resumed or repeated."""
    init: tuple[Path, ...] = ()
    about_resuming: tuple[str, ...] = ()

    @property
    def resumes(self) -> bool:
        return bool(self.request.resume)

    @property
    def notes(self) -> list[str]:
        return [*self.gpus.lines(), *self._keras_notes, *self._warnings]

    @property
    def _warnings(self) -> list[str]:
        network = [self.network.warning] if self.network.warning else []
        metrics = [f"metrics {metrics_server.address(self.metrics_port)}"] if self.metrics_port else []
        return [*self.gpus.notes, *self.about_resuming, *self._elastic_notes, *network, *metrics]

    @property
    def _elastic_notes(self) -> list[str]:
        if not self.elastic:
            return []
        least = counted(self.elastic["min_workers"], "worker")
        back = "join at the next checkpoint" if self.elastic["grow"] else f"wait for `{COMMAND} scale`"
        notes = [f"continues with {least} or more, without those that miss the rendezvous; returning ones {back}"]
        if not self.config.get("bitwise_elastic"):
            notes.append("another number of workers sums in another order, which changes bits; see --bitwise-elastic")
        return notes

    @property
    def _keras_notes(self) -> list[str]:
        if self.config.get("loop") == "fit":
            if self.cluster.kind.legacy_fit:
                return ["Model.fit is that of tf_keras, because Keras 3's own knows no parameter servers"]
            return ["Model.fit is that of Keras 3"]
        if not self.payload.needs_legacy_keras(self.cluster):
            return []
        return [
            "tf.keras is Keras 2 (tf_keras) for the script, because Keras 3's own fit knows no parameter servers; "
            "TF_USE_LEGACY_KERAS=0 keeps Keras 3"
        ]

    def _tensorboard(self) -> str | None:
        if self.tensorboard_port is None:
            return tensorboard.AUTO
        return tensorboard.address(self.tensorboard_port) if self.tensorboard_port else None

    def to_json(self) -> dict[str, Any]:
        batch = self.config.get("global_batch")
        shards = self.config.get("bitwise_elastic") or self.cluster.batch_divisor
        most = -(-shards // self.cluster.batch_divisor)  # of one replica: they need not share them evenly
        micro_batches = self.config.get("micro_batches", 1)
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
            "tensorboard": self._tensorboard(),
            "tasks": [
                {
                    "task": task.name,
                    "address": task.address,
                    "gpus": self.gpus.shown(task.name),
                    "tf_config": tf_config.render(self.cluster, task),
                }
                for task in self.cluster.tasks
            ],
            "elastic": self.elastic or None,
            "notes": self._warnings,
            "config": self.config,
            "compose": self.compose,
        }

    def _pipeline(self) -> dict[str, Any] | None:
        """Return the stages that the model is cut into, once its data is prepared; None for another strategy."""
        if not self.cluster.kind.staged or not self.data:
            return None
        stages, micro_batches = self.cluster.stages, self.config["micro_batches"]
        bubble = (stages - 1) / (micro_batches + stages - 1)
        cut = self.try_configuration()
        del cut["record"], cut["unverified"]
        return {
            **self.config["pipeline"],
            "pipelines": self.cluster.pipelines,
            "micro_batches": micro_batches,
            "bubble": bubble,
            **cut,
        }

    def try_configuration(self) -> dict[str, Any]:
        """Check that model, data and loss fit together; return the result of `configuration.check_config`."""
        path = self.payload.local_path()
        return configuration.check_config(self.config, self.cluster, path, memory_bytes=self.stage_memory_bytes)

    @property
    def stage_memory_bytes(self) -> int:
        """What each stage may hold; 0 where no limit is known. Stages of one task share its memory, or have a GPU."""
        if self.gpus.memory_bytes or not self.memory.task_bytes:
            return self.gpus.memory_bytes
        return max(1, (self.memory.task_bytes - TASK_MEMORY_BYTES) // self.cluster.devices)

    def _training(self) -> dict[str, Any] | None:
        """Return the numerics that follow from the configuration and the cluster; None for a script."""
        settings, batch = self.config.get("optimizer"), self.config.get("global_batch")
        if settings is None or batch is None:
            return None
        rule, base_batch = settings.get("scaling", "none"), settings.get("base_batch", batch)
        rate, schedule = settings["learning_rate"], settings.get("schedule", "constant")
        precision = compatibility.precision_of(self.cluster.strategy, self.config.get("precision", "fp32"))
        # Only oneDNN has kernels for bf16, and only this machine's processor is known.
        on_this_processor = self.config.get("onednn") == "on" and not self.gpus.ids and not self.runtime.is_remote
        return {
            "precision": precision,
            "bf16_is_faster": precision == "fp32" and on_this_processor and computes_bf16(),
            "optimizer": settings["name"],
            "learning_rate": compatibility.scale_rate(rate, rule, batch, base_batch),
            "scaling": rule,
            "base_learning_rate": rate,
            "base_batch": None if rule == "none" else base_batch,
            "warmup_steps": 0 if self.config.get("callbacks") and schedule == "constant" else settings["warmup_steps"],
            "schedule": schedule,
            "weight_decay": settings.get("weight_decay"),
            "ema": settings.get("ema", 0.0),
            "clip_norm": settings.get("clip_norm", 0.0),
        }


def computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has instructions for bf16 (AVX512_BF16 or AMX), on which it is faster than fp32."""
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "").split()
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)
