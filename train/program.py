"""The work of a task after its gate: serving, evaluating or training. Importing this module imports TensorFlow."""

import errno
import functools
import os
import re
import signal
import threading
from pathlib import Path

import tensorflow as tf
from tensorflow import keras

from cluster.contract import settings
from cluster.contract.compatibility import precision_of
from cluster.contract.recovery import standby_cluster
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.spec import Role, Task
from cluster.system.errors import ClusterError, PrerequisiteError, RunFailed
from cluster.system.json_files import DISK_FULL, read_json
from cluster.system.messages import COMMAND, system_error
from train import evaluator, patches, strategy
from train.config import TrainConfig
from train.context import TaskContext
from train.data import opening
from train.data.sources import Source
from train.loops import custom, fit
from train.loops.loop import Steps
from train.loops.training import Setup
from train.model import initial_weights, input_types, layer_state, models, objectives
from train.model.export import is_legacy
from train.patches import exact_order, placed_seeds
from train.pipeline.stage_models import TaskStages
from train.startup import rehearsal
from train.telemetry import environment
from train.telemetry.positions import Links

tf.get_logger().setLevel("ERROR")  # TensorFlow warns of every slow callback and every second trace

_ERRORS = tf.errors
PEER_LOST = (_ERRORS.UnavailableError, _ERRORS.AbortedError, _ERRORS.CancelledError, _ERRORS.DeadlineExceededError)
"""Errors that mean the loss of another task of the cluster, rather than a problem in this task; see `is_cancelled`."""
NOT_OF_MEMORY = (*DISK_FULL, errno.EMFILE, errno.ENFILE)
"""Errors of the system that TensorFlow reports as exhausted resources, like a lack of memory."""
LESS_MEMORY = "use a smaller batch, more --micro-batches, or --strategy pipeline with more --stages"
CANCELLED = (
    "an operation of a step failed, and TensorFlow reports only that it cancelled the others; often memory is short: "
    f"{LESS_MEMORY}; TF_CPP_MIN_LOG_LEVEL=1 shows the operation in the log"
)


class Program:
    """One generation of one task's training program."""

    def __init__(self, run: RunFolder, task: Task) -> None:
        self.run, self.task = run, task
        generation, restarts = int(os.environ.get("GENERATION", "0")), int(os.environ.get("RESTARTS", "0"))
        self.spec = membership.cluster(run, generation)
        self.config = TrainConfig.from_json(read_json(run.config))
        configure_threads(self.config)
        self.heartbeat = HeartbeatWriter(run, task, generation, restarts)
        self.stop = threading.Event()
        self._setup: Setup | None = None
        self._steps: Steps | None = None
        """Steps that a standby process has traced and compiled."""

    def stand_by(self) -> None:
        """Form a cluster with the other standby processes and prepare everything except the newest checkpoint."""
        self._setup = custom.prepare(self._task_context())
        self._steps = custom.rehearse_steps(self._setup)
        number = int(os.environ[standby_cluster.NUMBER])
        standby_cluster.report_ready(self.run, self.task.name, self.heartbeat.current.generation, number)

    def main(self) -> None:
        """Run this task; a standby process joins the generation that the environment now names."""
        if self._setup:
            self.heartbeat.update(generation=int(os.environ["GENERATION"]), restarts=int(os.environ["RESTARTS"]))
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        if self.spec.serves(self.task):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a server has nothing to save
            self.heartbeat.update(state="training")
            self.heartbeat.start()
            if self.task.role == Role.WORKER and self.config.source == "function":
                self._open_source()  # for graphs of other tasks
            strategy.run_tensorflow_server(self.task, self.config.threads)
        self.heartbeat.start()
        context = self._setup.context if self._setup else self._task_context()
        if self.spec.kind.synchronous:
            left_out = membership.left_out(self.run, self.heartbeat.current.generation)
            links = Links(membership.cluster_with_addresses(self.run).without(left_out), self.task)
            self.heartbeat.position = lambda: links.examine(context.positions.current())
        # Set the handler again, because TensorFlow's server replaces it to detect preemption.
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        if self.run.stop_requested:
            self.stop.set()  # the request arrived during the other handler
        if self.task.role == Role.CHIEF:
            if self.config.init_from and not self.heartbeat.current.generation:
                print(self._began, flush=True)
            environment.record_environment(self.run, self.config.dataset, context.source)
        self.heartbeat.update(state="compiling")  # the model is built, which can be the user's code
        if self.task.role == Role.EVALUATOR:
            evaluator.evaluate_checkpoints(context)
            self.heartbeat.update(state="done")
        elif self.config.loop == "fit":
            fit.train(context)
        else:
            custom.train(self._setup or custom.prepare(context), self._steps)
        self.heartbeat.stop()

    def _task_context(self) -> TaskContext:
        """Form the cluster, then build everything else, because collectives require the strategy first."""
        config = self.config
        if self.task.role == Role.EVALUATOR:
            gang = tf.distribute.get_strategy()
        else:
            gang = strategy.build_strategy(self.spec, strategy.configure_devices(self.spec.devices))
        # Only one task uses a stage's variables, so they are plain ones.
        scope_strategy = tf.distribute.get_strategy() if self.spec.kind.staged else gang
        keras.utils.set_random_seed(config.seed)
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()
        patches.apply(patches.LEGACY if is_legacy() else patches.TRAINING)
        placed_seeds.make_unseeded(config.seed)
        exact_order.keep_order_of_sums(config.micro_batches, deterministic=config.deterministic)
        source = self._open_source()

        new_model = functools.partial(models.build_configured, config, source.feature_shape, source.num_outputs)
        task_stages = None
        if self.spec.kind.staged and self.task.role != Role.EVALUATOR:  # the evaluator has the whole model
            task_stages = TaskStages(self.spec, self.task, config, self.run)
        with scope_strategy.scope(), strategy.precision_policy(precision_of(self.spec.strategy, config.precision)):
            model = task_stages.build(new_model, source.feature_shape) if task_stages else new_model()
        self._began = initial_weights.load_initial_weights(model, self.run.init) if config.init_from else ""
        objective = objectives.build_configured(
            config, classifies=source.classifies, shapes=lambda: models.example_shapes(model, source)
        )
        return TaskContext(
            run=self.run,
            task=self.task,
            spec=self.spec,
            config=config,
            source=source,
            objective=objective,
            strategy=scope_strategy,
            gang=gang,
            model=model,
            new_model=new_model,
            heartbeat=self.heartbeat,
            stop=self.stop,
            task_stages=task_stages,
        )

    def _open_source(self) -> Source:
        return opening.open_source(self.config, Path(os.environ.get("DATA_DIR", "data")), self.run)


def rehearse(run: RunFolder) -> None:
    """Prepare a standby process for a later generation without forming a cluster."""
    config = TrainConfig.from_json(read_json(run.config))
    if rehearsal.can_rehearse(config):
        configure_threads(config)
        rehearsal.rehearse_step()


def configure_threads(config: TrainConfig) -> None:
    """Set the numbers of threads. Call before any device is used, because that fixes them for the process."""
    tf.config.threading.set_intra_op_parallelism_threads(config.threads)
    for name, value in settings.one_core_threads().items():
        os.environ.setdefault(name, value)


def describe_lost_contact(error: Exception) -> str:
    """Return the reason in TensorFlow's error, of many lines, after the loss of another task of the cluster."""
    text = str(error)
    if silent := re.findall(r"^/job:(\w+)/replica:\d+/task:(\d+)$", text, re.MULTILINE):
        tasks = {job if job == Role.CHIEF else f"{job}-{number}" for job, number in silent}
        return f"no heartbeat of {' and '.join(sorted(tasks))} reached the chief"
    reason = re.search(r"aborted by: (?:Collective ops is aborted by: )*(.+)", text)  # by this task or by others
    return reason[1][:300] if reason else _first_reason(text)


def is_cancelled(error: Exception) -> bool:
    """Return whether an error that TensorFlow does not report has cancelled this task's collective operations.

    An error inside a function, such as those of stages, is reported after the operations that it cancelled.
    """
    return isinstance(error, _ERRORS.CancelledError) and "group is cancelled" in str(error)


def _first_reason(text: str) -> str:
    """Return the line of TensorFlow's error that has its reason, after those about the place of the operation."""
    lines = text.removeprefix("Graph execution error:").splitlines()
    reasons = [line for line in lines if line and not line.startswith((" ", "\t", "Detected at node", "<stack traces"))]
    return reasons[0][:200] if reasons else ""


def explain(error: Exception) -> ClusterError | None:
    """Return a one-line error for a failure that a restart cannot fix; None for other errors."""
    is_exhausted, reason = isinstance(error, tf.errors.ResourceExhaustedError), _first_reason(str(error))
    number = next((number for number in NOT_OF_MEMORY if is_exhausted and os.strerror(number) in str(error)), None)
    if isinstance(error, OSError):
        number, reason = error.errno, system_error(error)
    if number in DISK_FULL:
        return RunFailed(f"the disk is full ({reason}); free space, then `{COMMAND} up --resume` this run")
    if isinstance(error, MemoryError) or (is_exhausted and number is None):
        return RunFailed(f"out of memory ({reason or 'an array cannot be allocated'}); {LESS_MEMORY}")
    if isinstance(error, tf.errors.OpError):
        found = opening.explain(error) or layer_state.explain(error) or input_types.explain(error)
        return found or objectives.explain(error)
    if isinstance(error, PermissionError):
        return PrerequisiteError(f"{system_error(error)}; give the task's user access to it")
    return None
