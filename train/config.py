"""The training configuration: frozen dataclasses and checks of their values."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cluster.contract import compatibility, strategies
from cluster.system.errors import UsageError
from cluster.system.terminal import warn
from train.data.dataset_record import VERSIONS
from train.pipeline.schedule import SCHEDULES
from train.saving import timer
from train.settings import parts, references
from train.settings.parts import OPTIMIZERS, Optimizer, Pipeline, Transformer

__all__ = ["Optimizer", "Pipeline", "TrainConfig", "Transformer"]

MODELS = ("two_conv_cnn", "resnet50", "transformer_lm")
REPEATABLE = ("two_conv_cnn",)
"""Models that are bitwise repeatable with oneDNN's kernels. A ResNet's 1x1 convolutions with stride 2 are not."""
LOSSES = ("sparse_categorical_crossentropy", "mean_squared_error")
CALLBACKS = ("tutorial",)
OPTIONAL = ("callbacks", "metrics")
RANGES = {
    "global_batch": (1, 2**31 - 1),
    "seed": (0, 2**31 - 1),
    "threads": (0, 1024),
    "bitwise_elastic": (0, 4096),
    "micro_batches": (1, 4096),
    "steps_per_loop": (1, 10**6),
    "log_every": (1, 10**9),
    "keep_checkpoints": (1, 1000),
    "evaluate_every": (0, 10**9),
}
CHOICES = {
    "precision": strategies.PRECISIONS,
    "loop": ("custom", "fit"),
    "source": ("memory", "stream", "function"),
    "onednn": ("auto", "on", "avx512", "avx2", "off"),
    "pipeline.schedule": SCHEDULES,
}
TOO_FEW_INSTRUCTIONS = {"avx2": ("bf16", "fp16"), "avx512": ("fp16",)}
"""The precisions for which oneDNN, limited to these instructions, has no kernels on processors that compute in them."""
REFERENCES = {
    "dataset": tuple(VERSIONS),
    "model": MODELS,
    "loss": LOSSES,
    "callbacks": CALLBACKS,
    "metrics": (),
    "optimizer.name": OPTIMIZERS,
}
"""Built-in names of each field that may also name a user's `package.module:name`."""


@dataclass(frozen=True)
class TrainConfig:
    """The settings that determine what a run computes, as opposed to where."""

    preset: str = "fashion_mnist"
    """Name of the preset of this configuration."""

    loop: str = "custom"
    """`custom`: our own loop, many steps in one `tf.function`. `fit`: Keras's `Model.fit`."""

    source: str = "memory"
    """`memory`: arrays, loaded at the start. `stream`: TFRecord shards written by `invoke data.shard`. `function`:
    `dataset` is a function of (split, shard), which each task calls; see docs/guides/data.md."""

    num_outputs: int | str = ""
    """Number of classes of integer labels if `source` is `function`: `10`, or for several heads `digit=10,parity=2`."""

    dataset: str = "fashion_mnist"
    """`fashion_mnist`, `mnist`, `jargon_file`, or `package.module:function` that returns NumPy arrays
    (docs/guides/your-model.md). For `source` `stream`: the name of any TFDS dataset."""

    model: str = "two_conv_cnn"
    """`two_conv_cnn`, `resnet50`, `transformer_lm`, or `package.module:function`: (feature shape, outputs) -> model."""

    loss: str = "sparse_categorical_crossentropy"
    """`sparse_categorical_crossentropy` (of logits), `mean_squared_error`, or `package.module:function`: (labels,
    outputs) -> `[B] float32`, one loss per example. A model with several outputs takes one per head,
    `head=loss,head=loss`, or one function of both dictionaries; see docs/guides/your-model.md."""

    loss_weights: str = ""
    """Loss weights of a model with several outputs, such as `head=0.5,head=2`; 1 by default."""

    init_from: str = ""
    """Source of the initial weights: a run or a file, set by `up --init-from`; empty for random weights."""

    freeze: str = ""
    """Layers to exclude from training: names or patterns such as `block_*`, separated by commas."""

    metrics: str = ""
    """Additional evaluation metrics: `package.module:function` that returns a dictionary of functions (labels, outputs)
    -> `[B] float32`."""

    callbacks: str = ""
    """Empty for none; `tutorial`: per-epoch weights, TensorBoard, learning rate by epoch and early stopping; or
    `package.module:function`: (run folder, task's name) -> list of Keras callbacks. Works in both loops."""

    global_batch: int = 192
    """Examples per optimizer step, over all replicas; at least 1."""

    epochs: float = 3.0
    """Passes over the training data; above 0."""

    max_steps: int | None = None
    """Optimizer steps after which training ends even if epochs remain; at least 1."""

    seed: int = 42
    """Seed of the weights and of the order of the data, 0 to 2**31 - 1."""

    precision: str = "fp32"
    """Compute precision of layers: `fp32`, `bf16` or `fp16`. Weights, losses, gradient sums and exported models stay in
    float32. `fp16` uses loss scaling, see docs/guides/training.md."""

    deterministic: bool = True
    """Whether TensorFlow's operations must be bitwise repeatable, see docs/guides/reproducibility.md."""

    threads: int = 0
    """Intra-op threads of each task; 0: one per core of the machine. Sums are divided among them, so the bits depend on
    their number: with `deterministic` it is recorded when a run begins, and does not change."""

    onednn: str = "auto"
    """`on`, `avx512`, `avx2` or `off`: whether the CPU uses oneDNN's kernels, which can be twice as fast, and with
    which instruction set at most. `auto`: `on` for the two-conv CNN, which is then bitwise repeatable; TensorFlow's
    choice with `--no-deterministic`; otherwise, for your model in fp32, the instruction set of this processor with
    which all its operations are repeatable, else `off`. Recorded when a run begins (docs/guides/reproducibility.md)."""

    bitwise_elastic: int = 0
    """Number of virtual shards of the global batch, which must be divisible by it. Any number of replicas up to this
    gives the same bits, even if it changes during the run. 0: no virtual shards, one shard per replica."""

    micro_batches: int = 1
    """Gradient accumulation: equal parts of the batch of each replica or virtual shard, computed sequentially before
    one update, so that memory holds the activations of only one. See docs/guides/accumulation.md."""

    steps_per_loop: int = 25
    """Maximum number of optimizer steps per `tf.function` call; a stop takes effect between calls. At least 1."""

    log_every: int = 10
    """Optimizer steps between rows in metrics/ and points in TensorBoard; at least 1. Both are written at the end of
    each call, see `steps_per_loop`."""

    checkpoint_every: int | str = timer.AUTO
    """Checkpoint interval: optimizer steps such as `200`, seconds such as `30s` (at least 0.1), or `auto`, which
    minimizes the lost time, given the cost of a save and the frequency of failures. After a failure, `auto` saves right
    after the first new step, as any interval does if the failed generation finished no checkpoint. Seconds are measured
    by the chief, and all tasks save after the same step; `fit` with callbacks under parameter servers saves at the end
    of an epoch. A final checkpoint is always written."""

    check_replicas: int | str = timer.AUTO
    """When to compare the copies of the weights in all replicas, bit for bit, to detect silent corruption: `auto`
    with every checkpoint, snapshot and export; a number also at this interval of optimizer steps; 0 never. If copies
    differ, the faulty task is named, and the run continues from the previously saved state."""

    memory_snapshots: bool = True
    """Whether each task keeps its two newest states in memory, in up to 2 % of the time, so that a restart of its
    program repeats no steps. Not under parameter servers."""

    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep; at least 1."""

    evaluate_every: int = 0
    """Optimizer steps between evaluations; 0: at the end of every epoch."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer."""

    transformer: Transformer = field(default_factory=Transformer)
    """The size of `transformer_lm`."""

    pipeline: Pipeline = field(default_factory=Pipeline)
    """How the stages of a pipeline work together."""

    def check(self) -> TrainConfig:
        """Return this configuration; raise UsageError if a value is invalid or conflicts with another."""
        parts.check_types(self)
        for name, (low, high) in RANGES.items():
            parts.check_range(name, getattr(self, name), low, high)
        for name, choices in CHOICES.items():
            parts.check_choice(name, operator.attrgetter(name)(self), choices)
        if self.max_steps is not None:
            parts.check_range("max_steps", self.max_steps, 1, 10**12)
        parts.check_number("epochs", self.epochs, "a number above 0", valid=self.epochs > 0)
        timer.parse_interval(self.checkpoint_every)
        if self.check_replicas != timer.AUTO and not (
            isinstance(self.check_replicas, int) and self.check_replicas >= 0
        ):
            raise UsageError(f"--check-replicas {self.check_replicas!r}: expected auto, a number of steps, or 0 (off)")
        self.optimizer.check()
        self.transformer.check()
        parts.parse_losses(self.loss)
        parts.parse_weights(self.loss_weights)
        if self.callbacks == "tutorial" and not self.callbacks_set_rate:
            raise UsageError(
                f"--optimizer.schedule {self.optimizer.schedule} with --callbacks tutorial, which set the "
                "learning rate: omit one of them"
            )
        if self.precision in TOO_FEW_INSTRUCTIONS.get(self.onednn, ()):
            raise UsageError(
                f"--onednn {self.onednn} with --precision {self.precision}, for which oneDNN needs more instructions: "
                "omit --onednn"
            )
        if self.source == "function" and ":" not in self.dataset:
            raise UsageError(
                f"--source function with --dataset {self.dataset}: expected package.module:function, of (split, shard)"
            )
        if self.num_outputs and self.source != "function":
            raise UsageError(
                f"--num-outputs {self.num_outputs} with --source {self.source}, whose data determines it: omit it"
            )
        if not self.bitwise_elastic:
            return self
        option_and_value = f"--bitwise-elastic {self.bitwise_elastic}"
        if self.loop != "custom":
            raise UsageError(f"{option_and_value} with --loop fit: it needs --loop custom")
        if not self.deterministic:
            raise UsageError(f"{option_and_value} with --no-deterministic: it needs --deterministic")
        compatibility.check_micro_batches(self.global_batch, self.bitwise_elastic, self.micro_batches, "virtual shards")
        return self

    def pin(self, cores: int = 0) -> TrainConfig:
        """Return this configuration with `threads` and `onednn` resolved for `cores`, 0 for those of this machine."""
        threads, onednn = self.threads, self.onednn
        if self.deterministic:
            threads = threads or cores or len(os.sched_getaffinity(0))
        if onednn == "auto" and self.precision == "fp16":
            onednn = "off"  # on processors with AVX512_FP16 its steps take 30 times as long
        elif onednn == "auto" and self.model in REPEATABLE:
            onednn = "on"
        elif onednn == "auto" and self.deterministic and (self.model in MODELS or self.precision != "fp32"):
            onednn = "off"
        return dataclasses.replace(self, threads=threads, onednn=onednn)

    def check_references(self) -> TrainConfig:
        """Return this configuration; raise UsageError if a reference does not exist on this host."""
        for field_name, reference in self.references():
            if field_name == "dataset" and self.source == "stream":
                continue  # any TFDS dataset, which sharding checks
            if reference or field_name not in OPTIONAL:
                references.check_reference(parts.option(field_name), reference, REFERENCES[field_name])
        return self

    def references(self) -> list[tuple[str, str]]:
        """Return (field, value) of each field that may name the user's code; `loss` occurs once per head."""
        named = [(name, operator.attrgetter(name)(self)) for name in REFERENCES if name != "loss"]
        return named + [("loss", loss) for loss in parts.parse_losses(self.loss).values()]

    def code_dirs(self) -> list[Path]:
        """Return the folders of the user's modules."""
        named = [self.preset, *(reference for _, reference in self.references())]
        return list(dict.fromkeys(folder for name in named if (folder := references.code_dir(name))))

    def needs_tf_keras(self, strategy: str) -> bool:
        """Whether this configuration needs tf_keras under a strategy, a key of `strategies.STRATEGIES`."""
        return self.loop == "fit" and strategies.get(strategy).legacy_fit

    @property
    def learning_rate(self) -> float:
        """The learning rate for this global batch, after the warm-up."""
        rate, base_batch = self.optimizer.learning_rate, self.optimizer.base_batch
        return compatibility.scale_rate(rate, self.optimizer.scaling, self.global_batch, base_batch)

    @property
    def evaluation_batch(self) -> int:
        """The most test examples per replica and step: independent of the number of replicas, as the results are."""
        return min(500, 4 * (self.global_batch // self.micro_batches // (self.bitwise_elastic or 1)))

    @property
    def callbacks_set_rate(self) -> bool:
        """Whether callbacks may set the learning rate, which must then be a number without schedule or warm-up."""
        return bool(self.callbacks) and self.optimizer.schedule == "constant"

    @property
    def warmup_steps(self) -> int:
        return 0 if self.callbacks_set_rate else self.optimizer.warmup_steps

    def total_steps(self, num_examples: int) -> int:
        """Return the optimizer steps of the whole training on `num_examples` training examples."""
        steps = max(1, math.ceil(self.epochs * num_examples / self.global_batch))
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def epoch(self, step: int, num_examples: int) -> float:
        """Return the number of passes over the data after `step` optimizer steps."""
        return step * self.global_batch / num_examples

    def to_json(self) -> dict[str, Any]:
        """Return the form saved as `config.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainConfig:
        """Parse the result of `to_json`; ignore settings that this version does not have, with a warning."""
        part_types = {"optimizer": Optimizer, "transformer": Transformer, "pipeline": Pipeline}
        nested = {name: part(**_known(part, value[name], f"{name}.")) for name, part in part_types.items()}
        return cls(**(_known(cls, value) | nested)).check()


def _known(part: type[Any], value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings that this dataclass of the configuration has; warn of others."""
    known = {item.name for item in fields(part)}
    if unknown := [parts.option(prefix + name) for name in value if name not in known]:
        warn(f"{', '.join(unknown)} of a run's config.json: unknown to this version, ignored")
    return {name: setting for name, setting in value.items() if name in known}
