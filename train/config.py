"""The training configuration: frozen dataclasses, and the checks of their values."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.contract import compatibility, strategies
from cluster.system.errors import UsageError
from train.data.arrays import WINDOW
from train.pipeline.partition import PARTITIONS
from train.pipeline.schedule import SCHEDULES
from train.saving import timer
from train.settings import heads, references
from train.settings.field_types import check_choice, check_range, check_types, option
from train.settings.optimization import OPTIMIZERS, Optimizer
from train.settings.stopping import Best

__all__ = ["Best", "Optimizer", "Pipeline", "TrainConfig", "Transformer"]

LOOPS = ("custom", "fit")
ONEDNN = ("auto", "on", "off")
SINKS = ("csv", "mlflow", "wandb")
SOURCES = ("memory", "stream", "function")
DATASETS = ("fashion_mnist", "mnist", "jargon_file", "tiny_shakespeare", "breast_cancer", "imdb_reviews")
MODELS = ("two_conv_cnn", "resnet20", "resnet50", "transformer_lm")
REPEATABLE = ("two_conv_cnn",)
"""Those whose bits were seen to repeat with oneDNN's kernels. A ResNet's 1x1 convolutions with stride 2 do not."""
LOSSES = ("sparse_categorical_crossentropy", "mean_squared_error")
CALLBACKS = ("tutorial",)
OPTIONAL = ("callbacks", "metrics")
MAX_SHARDS = MAX_MICRO_BATCHES = 4096
REFERENCES = {
    "dataset": DATASETS,
    "model": MODELS,
    "loss": LOSSES,
    "callbacks": CALLBACKS,
    "metrics": (),
    "optimizer.name": OPTIMIZERS,
}
"""What is built in for each field that may also name something of the user's own, `package.module:name`."""


@dataclass(frozen=True)
class Transformer:
    """The size of the model `transformer_lm`."""

    layers: int = 4
    """Each an attention and a feed-forward block; at least 1."""

    width: int = 128
    """Of what flows between layers; a multiple of `heads`."""

    heads: int = 4
    """Of each attention; at least 1."""

    context: int = 128
    """Tokens of an example; a divisor of the 1024 bytes of a window of the text."""


@dataclass(frozen=True)
class Pipeline:
    """How the stages of `--strategy pipeline` work together, see docs/guides/pipelines.md."""

    schedule: str = "gpipe"
    """`gpipe`, `1f1b` or `pipedream`."""

    remat: bool = False
    """Whether a stage keeps what enters it alone, and computes the rest again for the backward."""

    cut: str = ""
    """The first layer of each stage but the first, separated by commas; empty: the cut whose slowest stage is fastest,
    see `partition_by`."""

    partition_by: str = "flops"
    """What the cut evens out: `flops`, the floating-point operations, or `measured`, the time that each block takes on
    the machine that starts the run."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what is computed, but not where."""

    preset: str = "fashion_mnist"
    """Name of the preset that this configuration started from."""

    loop: str = "custom"
    """`custom`: our own loop, many steps in one `tf.function`. `fit`: Keras's `Model.fit`."""

    source: str = "memory"
    """`memory`: arrays, read at the start. `stream`: TFRecord shards written by `invoke data.shard`. `function`: what
    `dataset`, a function of (split, shard), returns in each task, see docs/guides/data.md."""

    num_outputs: int | str = ""
    """Classes of whole-number labels where `source` is `function`: `10`, or of several heads `digit=10,parity=2`."""

    dataset: str = "fashion_mnist"
    """`fashion_mnist`, `mnist`, or `package.module:function` that returns NumPy arrays (docs/guides/your-model.md).
    For `source` `stream`: the name of any TFDS dataset."""

    model: str = "two_conv_cnn"
    """`two_conv_cnn`, `resnet50`, or `package.module:function`: (feature shape, outputs) -> Keras model."""

    loss: str = "sparse_categorical_crossentropy"
    """`sparse_categorical_crossentropy` (of logits), `mean_squared_error`, or `package.module:function`: (labels,
    outputs) -> `[B] float32`, the loss of every example. Of a model with several outputs one for each head,
    `head=loss,head=loss`, or one function of the dictionaries; see docs/guides/your-model.md."""

    loss_weights: str = ""
    """What the losses of a model with several outputs are multiplied by before they are added up, `head=0.5,head=2`;
    1 for those that are not named."""

    init_from: str = ""
    """Where the first weights come from: a run or a file, set by `up --init-from`; empty: they are random."""

    freeze: str = ""
    """Layers that are not trained: names, or beginnings of names that end in `*`, separated by commas."""

    metrics: str = ""
    """What evaluations report besides loss and score: `package.module:function`, which returns a dictionary of
    functions (labels, outputs) -> `[B] float32`."""

    callbacks: str = ""
    """None; `tutorial`: checkpoint, TensorBoard and learning rate by epoch, early stopping; or
    `package.module:function`: (run folder, task's name) -> list of Keras callbacks. Works in both loops."""

    global_batch: int = 192
    """Examples in one optimizer step, over all replicas; at least 1."""

    epochs: float = 3.0
    """Passes over the training data; above 0."""

    max_steps: int | None = None
    """Optimizer steps after which training ends even if epochs remain; at least 1."""

    seed: int = 42
    """Seed of the weights and of the order of the data, 0 to 2**31 - 1."""

    precision: str = "fp32"
    """What layers compute in: `fp32`, `bf16` or `fp16`. Weights, losses, sums of gradients and exported models stay in
    float32. With `fp16` losses are scaled, see docs/internals/performance.md."""

    deterministic: bool = True
    """Whether TensorFlow's operations must give the same bits every time, see docs/guides/reproducibility.md."""

    threads: int = 0
    """Threads that one operation may use in each task. 0: as many as the machine has cores. Sums are split up among
    them, so the bits depend on it: with `deterministic` the number is written down when a run begins, and stays."""

    onednn: str = "auto"
    """`on` or `off`: whether the CPU computes with oneDNN's kernels, which for convolutions can be twice as fast.
    `auto`: `on` for the two-conv CNN, whose bits were seen to repeat; with `deterministic` `off` for others, and
    otherwise as TensorFlow chooses by the processor. Recorded when a run begins (docs/guides/reproducibility.md)."""

    bitwise_elastic: int = 0
    """Virtual shards into which the global batch is cut, so that any number of replicas up to this gives the same bits,
    also when it changes on the way; the global batch must be divisible by it. 0: none, a shard a replica."""

    micro_batches: int = 1
    """Equal parts of each replica's batch, or virtual shard's, that are computed one after the other: their gradients
    are added up before the update, so that memory holds the activations of one. See docs/guides/accumulation.md."""

    steps_per_loop: int = 25
    """Most optimizer steps that run inside one `tf.function` call; a stop is noticed between two calls. At least 1."""

    log_every: int = 10
    """Optimizer steps between two rows in metrics/ and two points in TensorBoard; at least 1."""

    log_to: str = ""
    """Where metrics go beside the run folder and TensorBoard: `csv`, `mlflow`, `wandb`, separated by commas."""

    checkpoint_every: int | str = timer.AUTO
    """Between two checkpoints: optimizer steps such as `200`, seconds such as `30s`, at least 0.1, or `auto`: what
    loses least time, by what a save costs and how often the run fails. After a failure `auto` saves the first new step
    at once, as any interval does where all new steps were lost. Seconds are the chief's, and all tasks save after the
    same step; in `fit` with callbacks under parameter servers at the end of an epoch. One checkpoint is always written
    at the end."""

    keep_checkpoints: int = 3
    """Newest checkpoints that are kept; at least 1."""

    evaluate_every: int = 0
    """Optimizer steps between two evaluations; 0: at the end of every epoch."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer."""

    best: Best = field(default_factory=Best)
    """Which checkpoint is kept as the best, and early stopping."""

    transformer: Transformer = field(default_factory=Transformer)
    """The size of `transformer_lm`."""

    pipeline: Pipeline = field(default_factory=Pipeline)
    """How stages work together."""

    def check(self) -> TrainConfig:
        """Return this configuration if every value is in its range."""
        check_types(self)
        whole = {
            "global_batch": (1, 2**31 - 1),
            "seed": (0, 2**31 - 1),
            "threads": (0, 1024),
            "bitwise_elastic": (0, MAX_SHARDS),
            "micro_batches": (1, MAX_MICRO_BATCHES),
            "steps_per_loop": (1, 10**6),
            "log_every": (1, 10**9),
            "keep_checkpoints": (1, 1000),
            "evaluate_every": (0, 10**9),
        }
        for name, (low, high) in whole.items():
            check_range(name, getattr(self, name), low, high)
        if self.max_steps is not None:
            check_range("max_steps", self.max_steps, 1, 10**12)
        if not (math.isfinite(self.epochs) and self.epochs > 0):
            raise UsageError(f"{option('epochs')} {self.epochs:g}: expected a number above 0")
        self._check_checkpoint_every()
        self.optimizer.check()
        heads.losses(self.loss)
        heads.weights(self.loss_weights)
        for sink in self.sinks:
            check_choice("log_to", sink, SINKS)
        self.best.check(self.loop)
        if self.callbacks == "tutorial" and not self.rate_is_set:
            raise UsageError(
                f"--optimizer.schedule {self.optimizer.schedule} with --callbacks tutorial, which set the step size: "
                "leave one of them out"
            )
        check_choice("precision", self.precision, strategies.PRECISIONS)
        check_choice("loop", self.loop, LOOPS)
        check_choice("source", self.source, SOURCES)
        self._check_function()
        check_choice("onednn", self.onednn, ONEDNN)
        self._check_bitwise_elastic()
        self._check_transformer()
        check_choice("pipeline.schedule", self.pipeline.schedule, SCHEDULES)
        check_choice("pipeline.partition_by", self.pipeline.partition_by, PARTITIONS)
        return self

    def _check_function(self) -> None:
        if self.source == "function" and ":" not in self.dataset:
            raise UsageError(
                f"--source function with --dataset {self.dataset}: expected package.module:function, of (split, shard)"
            )
        if self.num_outputs and self.source != "function":
            raise UsageError(
                f"--num-outputs {self.num_outputs} with --source {self.source}, whose data says it: leave it out"
            )

    def _check_transformer(self) -> None:
        size = self.transformer
        check_range("transformer.layers", size.layers, 1, 1000)
        check_range("transformer.heads", size.heads, 1, 1000)
        check_range("transformer.width", size.width, 1, 2**16)
        if size.width % size.heads:
            raise UsageError(f"--transformer.width {size.width}: expected a multiple of the {size.heads} heads")
        if size.context < 2 or WINDOW % size.context:
            raise UsageError(f"--transformer.context {size.context}: expected a divisor of {WINDOW}, at least 2")

    def _check_checkpoint_every(self) -> None:
        try:
            timer.parse(self.checkpoint_every)
        except ValueError:
            raise UsageError(
                f"{option('checkpoint_every')} {self.checkpoint_every!r}: expected optimizer steps from 1 to "
                "1000000000 such as 200, seconds from 0.1 such as 30s, or auto"
            ) from None

    def _check_bitwise_elastic(self) -> None:
        if not self.bitwise_elastic:
            return
        if self.loop != "custom":
            raise UsageError(f"--bitwise-elastic {self.bitwise_elastic} with --loop fit: it needs --loop custom")
        if not self.deterministic:
            raise UsageError(
                f"--bitwise-elastic {self.bitwise_elastic} with --no-deterministic: it needs --deterministic"
            )
        compatibility.check_micro_batches(self.global_batch, self.bitwise_elastic, self.micro_batches, "virtual shards")

    def pin(self, cores: int = 0) -> TrainConfig:
        """Return this configuration with what depends on the machine written down, where bits depend on it.

        Args:
            cores: that each task can use; 0: those of this machine.
        """
        threads, onednn = self.threads, self.onednn
        if self.deterministic:
            threads = threads or cores or len(os.sched_getaffinity(0))
        if onednn == "auto" and (self.deterministic or self.model in REPEATABLE):
            onednn = "on" if self.model in REPEATABLE else "off"
        return dataclasses.replace(self, threads=threads, onednn=onednn)

    def check_references(self) -> TrainConfig:
        """Return this configuration if everything that it names is there: on the host, before anything is started."""
        for field_name, reference in self.references():
            if field_name == "dataset" and self.source == "stream":
                continue  # any TFDS dataset: the data step knows them
            if reference or field_name not in OPTIONAL:
                references.check(option(field_name), reference, REFERENCES[field_name])
        return self

    def references(self) -> list[tuple[str, str]]:
        """Return each field that may name something of the user's own, and what it names: the loss of each head."""
        named = [(name, operator.attrgetter(name)(self)) for name in REFERENCES if name != "loss"]
        return named + [("loss", loss) for loss in heads.losses(self.loss).values()]

    def code_dirs(self) -> list[Path]:
        """Return the folders from which the user's own modules come."""
        named = [self.preset, *(reference for _, reference in self.references())]
        return list(dict.fromkeys(folder for name in named if (folder := references.code_dir(name))))

    def needs_tf_keras(self, strategy: str) -> bool:
        """Whether this must run on tf_keras under a strategy, a key of `cluster.strategies.STRATEGIES`."""
        return self.loop == "fit" and strategies.get(strategy).legacy_fit

    @property
    def learning_rate(self) -> float:
        """The step size at this global batch, after the warm-up."""
        settings = self.optimizer
        return compatibility.scale_rate(
            settings.learning_rate, settings.scaling, self.global_batch, settings.base_batch
        )

    @property
    def sinks(self) -> list[str]:
        """What `log_to` names."""
        return [name.strip() for name in self.log_to.split(",") if name.strip()]

    @property
    def rate_is_set(self) -> bool:
        """Whether callbacks may set the step size, which takes one that is a number: no schedule and no warm-up."""
        return bool(self.callbacks) and self.optimizer.schedule == "constant"

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up."""
        return 0 if self.rate_is_set else self.optimizer.warmup_steps

    def total_steps(self, num_examples: int) -> int:
        """Return the optimizer steps of the whole training on `num_examples` training examples."""
        steps = max(1, math.ceil(self.epochs * num_examples / self.global_batch))
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def epoch(self, step: int, num_examples: int) -> float:
        """Return how many passes over the data are done after `step` optimizer steps."""
        return step * self.global_batch / num_examples

    def to_json(self) -> dict[str, Any]:
        """Return the form saved as `config.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainConfig:
        """Return the configuration that `to_json` described."""
        value = {**value, "optimizer": Optimizer(**value["optimizer"])}
        parts = {"best": Best, "transformer": Transformer, "pipeline": Pipeline}
        value |= {name: part(**value[name]) for name, part in parts.items()}
        return cls(**value).check()
