"""What a task does between its gate and its end. Importing this module imports TensorFlow."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cluster.errors import ClusterError, PrerequisiteError, RunFailed
from cluster.runs import DISK_FULL, Heartbeat, RunFolder, read_json, write_json
from cluster.spec import Role, Task
from train import checkpoint, evaluator, loops, models, steps, strategy
from train.config import Optimizer, TrainConfig
from train.data import arrays, memory
from train.export import export
from train.metrics import Metrics

EVALUATION_BATCH = 500
SHOWN_PREDICTIONS = 16


class Program:
    """One life of one task's training program."""

    def __init__(self, run: RunFolder, task: Task) -> None:
        self.run = run
        self.task = task
        self.spec = run.load_cluster()
        self.config = TrainConfig.from_json(read_json(run.config))
        self.chief = task.role == Role.CHIEF
        generation, restarts = int(os.environ.get("GENERATION", "0")), int(os.environ.get("RESTARTS", "0"))
        self.heartbeat = Heartbeat(run, task, generation, restarts)
        self.stop = threading.Event()
        self.train_seconds = 0.0
        self.timed_steps = 0
        self.results: dict[str, float] = {}

    def main(self) -> None:
        """Do this task's part of the run."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        if self.spec.serves(self.task):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a server has nothing to save
            self.heartbeat.update(state="training")
            self.heartbeat.start()
            strategy.serve(self.task)
        self.heartbeat.start()
        self.strategy = self._strategy()  # before any other use of TensorFlow: collectives are set up at its start
        # Again: a TensorFlow server takes SIGTERM for its own notice of preemption, which nothing here reads.
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        if self.run.stop_requested:
            self.stop.set()  # it came while that handler was in place
        keras.utils.set_random_seed(self.config.seed)
        if self.config.deterministic:
            tf.config.experimental.enable_op_determinism()
        self.data = arrays.find(Path(os.environ.get("DATA_DIR", "data")), self.config.dataset)
        with self.strategy.scope():
            self.model = self._build_model()
        self.test = memory.load(self.data.test)
        if self.task.role == Role.EVALUATOR:
            metrics = Metrics(self.run, self.task.name, talks=True)
            evaluator.evaluate_checkpoints(self.run, self.model, self.test, metrics, self.heartbeat, self.stop)
        else:
            self._train()
        self.heartbeat.stop()

    def _strategy(self) -> tf.distribute.Strategy:
        if self.task.role == Role.EVALUATOR:
            return tf.distribute.get_strategy()
        return strategy.build(self.spec, strategy.configure_devices(self.spec.devices))

    def _build_model(self) -> keras.Model:
        _, height, width, channels = self.data.train.images.shape
        return models.build(self.config.model, (height, width, channels), len(self.data.classes))

    def _train(self) -> None:
        """Train from the newest checkpoint to the end, or until a stop."""
        config, spec = self.config, self.spec
        asynchronous = spec.strategy == "ps"
        with self.strategy.scope():
            self.optimizer = build_optimizer(config.optimizer)
            self.optimizer.build(self.model.trainable_variables)  # here, or its slot variables land on the chief
            done = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
        self.checkpoint = checkpoint.Checkpoint(
            self.model, self.optimizer, done, self.run.checkpoints, keep=config.keep_checkpoints, writes=self.chief
        )
        first = self.checkpoint.restore()
        self.total = config.total_steps(self.data.train.num_examples)
        if self.chief:
            (self.run.control / "result.json").unlink(missing_ok=True)  # an earlier life may have died after it
            self.run.event(self.task.name, "restored" if first else "initialized", step=first)
            self.heartbeat.update(steps_total=self.total)
        self.metrics = Metrics(self.run, self.task.name, talks=self.chief, resumed_at=first)
        trainee = steps.Trainee(
            self.model,
            self.optimizer,
            config.global_batch,
            1 if asynchronous else self.strategy.num_replicas_in_sync,
            config.seed,
        )
        if asynchronous:
            from train import parameter_server

            workers = len(spec.of(Role.WORKER))
            inner = parameter_server.asynchronous(
                self.strategy, trainee, self.data.train, config.steps_per_loop, workers
            )
        else:
            inner = steps.synchronous(self.strategy, trainee, memory.load(self.data.train), config.steps_per_loop)
        # Under parameter servers the chief evaluates by itself: it can read every variable.
        shared = tf.distribute.get_strategy() if asynchronous else self.strategy
        self.evaluate = steps.evaluation(shared, self.model, self.test, batch=EVALUATION_BATCH)
        self.heartbeat.update(state="compiling", step=first)
        epoch_steps = -(-self.data.train.num_examples // config.global_batch)
        step, stopped = loops.run(
            inner,
            first,
            self.total,
            steps_per_loop=config.steps_per_loop,
            every=[
                loops.Every(config.checkpoint_every, self._save),
                loops.Every(config.evaluate_every or epoch_steps, self._evaluate),
            ],
            report=self._report,
            stop=self.stop.is_set,
        )
        self._end(step, stopped)

    def _report(self, progress: loops.Progress) -> None:
        """Tell the heartbeat, the metrics and, the first time, the events of some steps just done."""
        config, step = self.config, progress.step
        examples_per_s = None
        if progress.compiled:
            self.heartbeat.update(state="training")
            if self.chief:
                self.run.event(self.task.name, "first step", step=step)
                self.metrics.graph(self._serving_graph())
        else:
            self.train_seconds += progress.seconds
            self.timed_steps += step - progress.first
            examples_per_s = (step - progress.first) * config.global_batch / progress.seconds
        self.heartbeat.update(step=step, loss=float(progress.result.losses[-1]), examples_per_s=examples_per_s)
        for at in range(progress.first + 1, step + 1):
            if at % config.log_every == 0 or at == self.total:
                values = {
                    "loss": float(progress.result.losses[at - progress.first - 1]),
                    "accuracy": float(progress.result.accuracies[at - progress.first - 1]),
                    "examples_per_s": examples_per_s,
                }
                self.metrics.log(at, self._epoch(at), self.total, values)

    def _epoch(self, step: int) -> float:
        return self.config.epoch(step, self.data.train.num_examples)

    def _serving_graph(self) -> tf.types.experimental.ConcreteFunction:
        specification = tf.TensorSpec([None, *self.data.train.images.shape[1:]], tf.float32, name="image")
        return tf.function(self.model.__call__).get_concrete_function(specification)

    def _save(self, step: int) -> None:
        self.heartbeat.update(state="saving")
        self.checkpoint.save(step)
        if self.chief:
            self.run.event(self.task.name, "checkpoint", step=step)
        self.heartbeat.update(state="training")

    def _evaluate(self, step: int) -> None:
        self.heartbeat.update(state="evaluating")
        self.results = self.evaluate()
        if self.chief:
            self.metrics.log(step, self._epoch(step), self.total, dict(self.results))
            self._show_predictions(step)
        self.heartbeat.update(state="training")

    def _show_predictions(self, step: int) -> None:
        images_BHWC = self.test[0][:SHOWN_PREDICTIONS].numpy()
        said_B = np.argmax(self.model(images_BHWC.astype(np.float32), training=False), -1)
        truth_B = self.test[1][:SHOWN_PREDICTIONS].numpy()
        names = self.data.classes
        self.metrics.predictions(step, images_BHWC, [names[k] for k in said_B], [names[k] for k in truth_B])

    def _end(self, step: int, stopped: bool) -> None:
        """Save; at the end of the training also evaluate and export. Then leave the cluster, the chief last."""
        self._save(step)
        if not stopped:
            self._evaluate(step)
        if self.chief:
            if not stopped:
                self.heartbeat.update(state="saving")
                export(self.model, self._build_model(), self.run.export)
                self.run.event(self.task.name, "exported", step=step)
                self.metrics.hparams(self.config, self.results)
            write_json(self.run.control / "result.json", self._result(step))
        self.metrics.flush()
        self.heartbeat.update(state="stopped" if stopped else "done", step=step)
        while not self.chief and not (self.run.control / "result.json").exists() and not self.run.outcome:
            time.sleep(0.02)  # the chief's coordination service counts a task that left early as lost

    def _result(self, step: int) -> dict[str, object]:
        rate = self.timed_steps * self.config.global_batch / self.train_seconds if self.train_seconds else None
        return {
            "steps": step,
            "epochs": round(self._epoch(step), 4),
            "examples_per_s": rate and round(rate, 1),
            "metrics": self.results,
            "weights_sha256": loops.weights_sha256(self.model),
        }


def build_optimizer(settings: Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer; call it inside the strategy's scope."""
    rate: float | keras.optimizers.schedules.LearningRateSchedule = settings.learning_rate
    if settings.warmup_steps:
        rate = keras.optimizers.schedules.PolynomialDecay(
            settings.learning_rate / settings.warmup_steps, settings.warmup_steps, settings.learning_rate
        )
    if settings.name == "sgd":
        return keras.optimizers.SGD(rate, settings.momentum)
    return keras.optimizers.Adam(rate)


def is_peer_lost(error: Exception) -> bool:
    """Whether the error says that another task of the cluster is gone, rather than that something is wrong here."""
    errors = tf.errors
    lost = (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    return isinstance(error, lost)


def explain(error: Exception) -> ClusterError | None:
    """Return the error in one line where trying again cannot help, otherwise None."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return RunFailed(f"the disk is full ({error.filename}); free space, then `invoke up --resume` this run")
    if isinstance(error, tf.errors.ResourceExhaustedError) and "No space left" in str(error):
        return RunFailed("the disk is full; free space, then `invoke up --resume` this run")
    if isinstance(error, PermissionError):
        return PrerequisiteError(f"{error.filename}: no permission; give the task's user access to it")
    return None
