"""`--loop fit`: Keras's `Model.fit`, with the same data order, actions and report as the custom loop.

It is Keras 3's `fit`, patched for several tasks by `train/patches/`, or under parameter servers, which Keras 3 does not
support, tf_keras's. The choice is made before TensorFlow is imported (`train/startup/preload.py`).
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.records import Place
from cluster.system.errors import UsageError
from train import random_operations
from train.context import TaskContext
from train.data.batches import Batch, BatchSlice, Replicas, rebatch
from train.loops import compiling
from train.loops.loop import Loop, Stop
from train.loops.steps import LoopResult
from train.loops.train_step import cast_features
from train.loops.training import Setup, Training
from train.model import layer_state
from train.model.export import is_legacy
from train.model.gradients import GradientPolicy
from train.patches import batch_normalization, central_storage, layer_aggregation, placed_seeds
from train.telemetry.step_timer import Times


def train(context: TaskContext) -> None:
    """Train from the newest checkpoint to the end or a stop, then save, evaluate and report."""
    config, model = context.config, context.model
    with context.strategy.scope():
        batch_normalization.synchronize_batch_normalization(model, context.strategy.num_replicas_in_sync)
        if not is_legacy() and context.strategy.num_replicas_in_sync > 1:
            for variable in layer_state.variables_of(model):
                layer_aggregation.aggregate(variable)  # as `LayerState` does in the custom loop
                if variable.aggregation == "sum":
                    layer_aggregation.add_changes(variable)
    setup = Setup(context)
    optimizer = setup.policy.optimizer
    if config.micro_batches == 1:
        setup.policy.install(model.trainable_variables)
        if not is_legacy():
            for owned in layer_state.own_optimizers(model).values():
                GradientPolicy(owned).install(owned._trainable_variables)
    first = setup.restore()
    if not is_legacy():
        central_storage.let_replicas_assign([*model.variables, *optimizer.variables])
    with context.strategy.scope():
        micro_batches = MicroBatches(context, setup.policy) if config.micro_batches > 1 else None
        if not micro_batches and not context.asynchronous:  # under parameter servers Keras logs only epochs
            separate_steps(model, first)
        compiling.compile_model(context, optimizer, model.compile)
    evaluation = context.new_evaluation()  # here, because `fit` would create it in the strategy's scope
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
            shuffle=False,  # the data is already shuffled
            verbose=0,
        )
    training.end(loop.step, callback.stop)


def separate_steps(model: keras.Model, first: int) -> None:
    """Make Keras log each step's loss and score, as the custom loop does, instead of means over the epoch so far.

    Random numbers are then derived from the step and the replica, see `train/patches/placed_seeds.py`. The steps are
    counted here from `first`, as a model's `train_step` may use other optimizers than the run's. Call inside the
    strategy's scope.
    """
    train_step, owner = model.train_step, f"{type(model).__name__}.train_step"
    done = tf.Variable(first, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def separate(data: Any) -> Any:
        for metric in model.metrics:
            metric.reset_state()
        step = tf.convert_to_tensor(done)
        with placed_seeds.random_place(step, _replica()):
            try:
                logs = train_step(data)
            except ValueError as error:
                if "Unknown variable" not in str(error):
                    raise
                advice = "build its layers where the model is made, such as by keras.Input"
                raise UsageError(f"--loop fit: a layer creates weights in {owner}: {advice}") from None
        random_operations.warn_of_drawing(owner, tf.compat.v1.get_default_graph())
        done.assign(step + 1)
        return logs

    model.train_step = separate


class MicroBatches:
    """Gradient accumulation: replaces a model's `train_step` with that of the custom loop, and keeps its metrics."""

    def __init__(self, context: TaskContext, policy: GradientPolicy) -> None:
        """Call inside the strategy's scope, with a model that passes `check_micro_batches`."""
        # Loops of several replicas deadlock if they read the same variables of one device.
        central = isinstance(context.strategy, tf.distribute.experimental.CentralStorageStrategy)
        self._step = context.new_train_step(policy, unrolled=central)
        self._means = [keras.metrics.Mean(name) for name in ("loss", context.objective.score_name)]
        self._separate = not context.asynchronous  # see `separate_steps`
        context.model.train_step = self._train

    def reset(self) -> None:
        for mean in self._means:
            mean.reset_state()

    def _train(self, data: Any) -> dict[str, tf.Tensor]:
        step, replica = tf.cast(self._step.policy.optimizer.iterations, tf.int64), _replica()
        examples = self._step.global_batch // self._step.num_replicas
        data = tf.nest.map_structure(lambda tensor: tf.ensure_shape(tensor, [examples, *tensor.shape[1:]]), data)
        features, labels, *weights = data
        args = Batch(features, labels, weights[0] if weights else tf.ones([examples])), step, replica
        computed = self._step.accumulated(self._step.compute_batch, lambda function, args: function(*args), args)
        shares_12 = self._step.update(computed)
        if self._separate:
            self.reset()
        for mean, share in zip(self._means, tf.unstack(shares_12[0]), strict=True):
            mean.update_state(share * self._step.num_replicas, sample_weight=examples)
        return {mean.name: mean.result() for mean in self._means}


def _replica() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)


class ActionsCallback(keras.callbacks.Callback):
    """The only callback that Keras gets; it runs the actions of the training between some of Keras's batches.

    A call of the loop is several of Keras's batches; under parameter servers, where Keras calls back only at the end of
    an epoch, it is one of Keras's epochs. The user's callbacks are called for each batch and do not see these epochs.
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
        """Why training stops; None while it continues."""
        if not context.asynchronous:
            # Under parameter servers Keras refuses callbacks that have these methods.
            self.on_train_batch_begin = self._on_batch_begin
            self.on_train_batch_end = self._on_batch_end
        else:
            context.heartbeat.position = self._report_step

    def _report_step(self) -> None:
        """Report the steps of an epoch in progress, which may take long, in each heartbeat."""
        beat = self._context.heartbeat
        with contextlib.suppress(tf.errors.OpError):
            # The last heartbeat must not wait for a parameter server that is gone.
            if self.stop is None and (step := int(self._context.model.optimizer.iterations.numpy())) > self._loop.step:
                beat.update(step=step, state="training" if beat.current.state == "compiling" else beat.current.state)

    @property
    def step(self) -> int:
        """Steps done, including those of an unfinished call."""
        return self._loop.step + len(self._results)

    def next_epochs(self) -> tuple[int, int]:
        """Return the number of steps in Keras's next epoch, and the number of such epochs in the next call of `fit`.

        Under parameter servers, an epoch is as short as a call of the custom loop. With the user's callbacks it is a
        whole epoch; these have different lengths, so that each needs a separate call of `fit`.
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
            # Waiting for input cannot be told apart: Keras gets the batch from the iterator inside the step.
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
        values = {name: float(value) for name, value in (logs or {}).items() if np.size(value) == 1}
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
    # Keras 3 splits global batches itself. The number of shards is that of the custom loop.
    replicas = context.strategy.num_replicas_in_sync if source.sharded else 1
    return task_dataset(tf.distribute.InputContext(num_replicas_in_sync=replicas))
