"""The tf.distribute strategy of a cluster, and the gRPC servers of parameter servers and their workers."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow import keras

from cluster.contract.spec import ClusterSpec, Role, Task
from cluster.system.errors import PrerequisiteError, UsageError
from train.patches import central_sums

TPU_TIMEOUT_S = 10.0
GPUS_GIVEN = "GPUS_GIVEN"
"""Environment variable with the number of GPUs that the plan assigned to this task."""


def configure_devices(devices: int) -> list[str]:
    """Configure a device for each replica of this process; return their names.

    A machine with fewer GPUs gets logical CPU devices, so that tests take the same code path. Call before any other use
    of TensorFlow. Raises PrerequisiteError if TensorFlow cannot use the GPUs that the plan assigned to this task.
    """
    gpus = check_gpus()
    if len(gpus) >= devices:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)  # several tasks may share a GPU
        return [f"GPU:{index}" for index in range(devices)]
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return [f"CPU:{index}" for index in range(devices)]


def check_gpus() -> list[tf.config.PhysicalDevice]:
    """Return the GPUs of this process; raise PrerequisiteError if planned ones are missing, rather than use CPUs."""
    gpus: list[tf.config.PhysicalDevice] = tf.config.list_physical_devices("GPU")
    assigned = int(os.environ.get(GPUS_GIVEN, "0"))
    if len(gpus) < assigned:
        raise PrerequisiteError(
            f"TensorFlow sees {len(gpus)} of {assigned} GPUs that were given to this task; with TF_CPP_MIN_LOG_LEVEL=0 "
            "and TF_CPP_MAX_VLOG_LEVEL=1 its log names what it cannot load: install that, or train with --gpus none"
        )
    return gpus


def build_strategy(spec: ClusterSpec, devices: list[str]) -> tf.distribute.Strategy:
    """Build the strategy and form its cluster, which TF_CONFIG describes.

    All members must be running, which the agents' rendezvous ensures: TensorFlow waits for them indefinitely.
    """
    return BUILDERS[spec.strategy](spec, devices)


def _multiworker(_spec: ClusterSpec, devices: list[str]) -> tf.distribute.Strategy:
    implementation = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementation.NCCL if devices[0].startswith("GPU") else implementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def run_tensorflow_server(task: Task, threads: int) -> None:
    """Serve the chief as a parameter server or worker until this process ends; `threads` per operation, 0 for all."""
    if GPUS_GIVEN in os.environ:
        check_gpus()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert task.role in (Role.PS, Role.WORKER)
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads),
        start=True,
    ).join()


def _tpu(spec: ClusterSpec, _devices: list[str]) -> tf.distribute.Strategy:
    """Build the strategy of the TPU that TPU_NAME names, or of the local one."""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=os.environ.get("TPU_NAME", "local"))
        if (address := resolver.master()).startswith("grpc://"):  # TensorFlow would wait for it indefinitely
            host, _, port = address.removeprefix("grpc://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=TPU_TIMEOUT_S).close()
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise PrerequisiteError(
            f"cannot reach a TPU ({str(error).splitlines()[0]}); set TPU_NAME to one that answers"
        ) from error
    if strategy.num_replicas_in_sync != spec.devices:
        raise UsageError(
            f"--devices {spec.devices}: this TPU has {strategy.num_replicas_in_sync} cores; use --devices "
            f"{strategy.num_replicas_in_sync}"
        )
    return strategy


BUILDERS: dict[str, Callable[[ClusterSpec, list[str]], tf.distribute.Strategy]] = {
    "one": lambda _, devices: tf.distribute.OneDeviceStrategy(f"/{devices[0]}"),
    "mirrored": lambda _, devices: tf.distribute.MirroredStrategy([f"/{device}" for device in devices]),
    "central": lambda _, devices: central_sums.create_strategy([f"/{name}" for name in devices]),
    "multiworker": _multiworker,
    "ps": lambda *_: tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver()),
    "tpu": _tpu,
    # Used to form the cluster and for collectives between tasks; no variable is created in its scope.
    "pipeline": lambda spec, devices: BUILDERS["multiworker" if spec.members else "one"](spec, devices),
}
"""Builder of each strategy in `cluster.contract.strategies`: (cluster, this task's devices) -> strategy."""

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


@contextlib.contextmanager
def precision_policy(precision: str) -> Iterator[None]:
    """Context manager that sets the compute precision of layers built inside.

    Their weights stay in float32, and models built outside, such as the exported one, compute in float32. With `fp32`,
    a policy that the user's module set on import is kept.
    """
    if precision != "fp32":
        keras.mixed_precision.set_global_policy(POLICIES[precision])
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")
