"""`--loop fit`: Keras's `Model.fit`, with the same data order, actions and report as the custom loop.

Keras 3 provides it, repaired for several tasks by `train/patches/`. Under parameter servers tf_keras provides it,
because Keras 3 does not support them. The choice is made before TensorFlow is imported (`train/startup/preload.py`).
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.records import Place
from cluster.system.errors import UsageError
from train.context import TaskContext
from train.data.batches import Batch, BatchSlice, Replicas, rebatch
from train.loops.fit_model import MicroBatches, compile_arguments, separate_steps
from train.loops.loop import Loop, Stop
from train.loops.steps import LoopResult
from train.loops.train_step import cast_features
from train.loops.training import Setup, Training
from train.model.export import is_legacy
from train.model.layer_state import variables_of
from train.patches import batch_normalization, central_storage, layer_aggregation
from train.telemetry.timing import Times


def train(context: TaskContext) -> None:
    """Train from the newest checkpoint to the end or to a stop, then save, evaluate and report."""
    config, model = context.config, context.model
    with context.strategy.scope():
        batch_normalization.synchronize_batch_normalization(model, context.strategy.num_replicas_in_sync)
        if not is_legacy() and context.strategy.num_replicas_in_sync > 1:
            for variable in variables_of(model):
                layer_aggregation.aggregate(variable)  # as `LayerState` does in the custom loop
    setup = Setup(context)
    optimizer = setup.policy.optimizer
    if config.micro_batches == 1:
        setup.policy.install(model.trainable_variables)
    first = setup.restore()
    if not is_legacy():
        central_storage.let_replicas_assign([*model.variables, *optimizer.variables])
    with context.strategy.scope():
        micro_batches = MicroBatches(context, setup.policy) if config.micro_batches > 1 else None
        if not micro_batches and not context.asynchronous:  # there Keras logs whole epochs only
            separate_steps(model, optimizer)
        # XLA over collectives on CPU crashes the process.
        model.compile(optimizer, **compile_arguments(context), jit_compile=False)
        model.optimizer = optimizer  # without Keras's loss scaling, see `train/model/gradients.py`
    evaluation = context.new_evaluation()  # not in the strategy's scope, as inside `fit`
    training = Training(setup, first, lambda: evaluation)
    setup.checkpoint.prepare()
    training.begin()
    loop = Loop(first, training.actions(batches=False), steps_per_loop=config.steps_per_loop)
    callback = ActionsCallback(context, training, loop, micro_batches)
    while callback.stop is None:
        count, times = callback.next_epochs()
        model.fit(
            _data(context, callback.step),
            epochs=times,
            steps_per_epoch=count,
            callbacks=[callback],
            shuffle=False,  # the data is in its order already
            verbose=0,
        )
    training.end(loop.step, callback.stop)


class ActionsCallback(keras.callbacks.Callback):
    """Keras's only callback, which runs the actions of the training between some of Keras's batches.

    A call of the loop is several of Keras's batches; under parameter servers, where Keras calls back only when an epoch
    ends, it is one of Keras's epochs. The user's callbacks are called for each batch and do not notice these epochs.
    """

    def __init__(
        self, context: TaskContext, training: Training, loop: Loop, micro_batches: MicroBatches | None
    ) -> None:
        super().__init__()
        self._context, self._training, self._loop, self._micro_batches = context, training, loop, micro_batches
        self._workers = context.worker_records()
        self._began = 0.0
        self._call_steps = 0
        self._results: list[dict[str, float]] = []
        """Values of each step of the call so far."""
        self._batch_s: list[float] = []
        self.stop = Stop.END if training.finished else None
        """The reason if training stops."""
        if not context.asynchronous:
            # Under parameter servers Keras refuses callbacks that have these methods.
            self.on_train_batch_begin = self._on_batch_begin
            self.on_train_batch_end = self._on_batch_end

    @property
    def step(self) -> int:
        """Steps done, with those of an unfinished call."""
        return self._loop.step + len(self._results)

    def next_epochs(self) -> tuple[int, int]:
        """Return the steps of Keras's next epoch, and the number of such epochs in one call of `fit`.

        Under parameter servers an epoch is as short as a call of the custom loop, unless the user's callbacks count in
        epochs, which have different lengths, so that each needs a separate call.
        """
        context, step = self._context, self.step
        left = context.total_steps - step
        if not context.asynchronous:
            return left, 1
        if self._training.callbacks:
            return min(context.epoch_end(step) - step, left), 1
        if step == self._training.first and self._training.save.timer.due(0):  # until there is a checkpoint
            return 1, 1
        count = min(context.config.steps_per_loop, left)
        return count, left // count

    def on_epoch_begin(self, _epoch: int, _logs: Any = None) -> None:
        if self._micro_batches:
            self._micro_batches.reset()
        if self._context.asynchronous:
            self._loop.begin_call()
            self._began = time.perf_counter()

    def _on_batch_begin(self, *_batch: int, **_logs: Any) -> None:
        if not self._results:
            self._call_steps = self._loop.begin_call()
        step = self.step
        if self._training.callbacks:
            self._training.callbacks.before(step)
        self._training.trace.before(step)
        self._context.positions.set(Place.EXCHANGE, step + 1)
        self._began = time.perf_counter()

    def _on_batch_end(self, _batch: int, logs: dict[str, float] | None = None) -> None:
        values = self._add(1, logs)  # waits for the device
        self._batch_s.append(time.perf_counter() - self._began)
        step = self.step
        self._training.report.done(step)
        self._training.trace.end(step)
        if self._training.callbacks:
            self._training.callbacks.end_batch(step, 1, values)
        if len(self._results) == self._call_steps:
            # The parts of a step are unknown: Keras gets the batch from the iterator inside it.
            self._end_call(sum(self._batch_s), Times(np.array(self._batch_s)))

    def on_epoch_end(self, _epoch: int, logs: dict[str, float] | None = None) -> None:
        """End a call under parameter servers."""
        if not self._context.asynchronous:
            return
        seconds, count = time.perf_counter() - self._began, self.params["steps"]
        values = self._add(count, logs)
        for worker in self._workers:  # Keras does not report which worker did which step
            worker.done(self._loop.step + count)
        if self._training.callbacks:
            self._training.callbacks.add(count, {name: count * value for name, value in values.items()})
        self._end_call(seconds, None)

    def _add(self, count: int, logs: Mapping[str, Any] | None) -> dict[str, float]:
        values = {name: float(value) for name, value in (logs or {}).items()}
        if "loss" not in values:
            raise UsageError(
                f"--model {self._context.config.model}: its train_step returned {', '.join(values) or 'nothing'}; "
                "expected 'loss' among them"
            )
        self._results += [values] * count
        return values

    def _end_call(self, seconds: float, times: Times | None) -> None:
        names = {name: None for values in self._results for name in values}
        values = {name: np.array([step.get(name, np.nan) for step in self._results], np.float32) for name in names}
        signals = self._training.agree(self._training.request(len(self._results), 0))
        self._context.positions.set(Place.EXCHANGE, self.step, left=True)
        self._results, self._batch_s = [], []
        self.stop = self._loop.end_call(LoopResult(values, signals, times), seconds)
        self.model.stop_training = self.stop is not None


def _data(context: TaskContext, first: int) -> Any:
    """Return the infinite training data from step `first`, in the form that `fit` takes under this strategy."""
    config, source = context.config, context.source

    def pair_or_triple(batch: Batch) -> tuple[tf.Tensor, ...]:
        features = cast_features(context.model, batch.features)
        return (features, batch.labels, batch.weights) if source.weighted else (features, batch.labels)

    def task_dataset(pipeline: tf.distribute.InputContext) -> tf.data.Dataset:
        if context.asynchronous:
            return source.shuffled_batches(config.global_batch, config.seed).map(pair_or_triple)
        replicas = Replicas.from_context(pipeline)
        batches = source.train_dataset(BatchSlice(config.global_batch, config.seed, first, replicas=replicas))
        if replicas.count > 1 and not context.spec.kind.collective:
            batches = rebatch(batches, config.global_batch)
        return batches.map(pair_or_triple)

    if is_legacy():
        return keras.utils.experimental.DatasetCreator(task_dataset)
    if context.spec.kind.collective:  # each task prepares its part of every batch
        return context.strategy.distribute_datasets_from_function(task_dataset)
    # Keras 3 divides global batches itself. The number of shards is that of the custom loop.
    replicas = context.strategy.num_replicas_in_sync if source.sharded else 1
    return task_dataset(tf.distribute.InputContext(num_replicas_in_sync=replicas))
