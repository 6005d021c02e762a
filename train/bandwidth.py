"""Measures the all-reduce between this process' devices, by the definitions of NCCL's tests.

python -m train.bandwidth --devices 8        prints a line of JSON; uses logical CPUs if there are fewer GPUs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from cluster.system.errors import ClusterError, RunFailed, UsageError
from train.model import variables

SIZES_MIB = (64, 128, 256, 512)
CHAIN = 8
"""Consecutive sums in one call, so that the overhead of the call hardly counts."""
CALLS = 5
TOLERANCE = 1e-3
"""Allowed relative error of sums of sums in float32."""


def bus_bandwidth(size_bytes: float, seconds: float, devices: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, which is the traffic of each link for any number of devices.

    The definition is that of NCCL's tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that results can be
    compared with theirs and with the specification of the hardware.
    """
    return 2 * (devices - 1) / devices * size_bytes / seconds / 1e9


def measure(devices: int, sizes_mib: Sequence[int]) -> dict[str, Any]:
    """Measure an all-reduce under MirroredStrategy for each size. Imports TensorFlow.

    Raises:
        PrerequisiteError: the plan assigned GPUs to this task, and TensorFlow cannot use them.
        RunFailed: a sum is wrong.
    """
    import tensorflow as tf

    from train.strategy import configure_devices

    names = configure_devices(devices)
    strategy = tf.distribute.MirroredStrategy([f"/{name}" for name in names])

    def sums(tensor_N: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        for _ in range(CHAIN):
            tensor_N = context.all_reduce("SUM", tensor_N)
        return tensor_N

    def call(tensors: Any) -> Any:
        return strategy.run(sums, args=(tensors,))

    def finish(result: Any) -> list[float]:
        """Wait for all devices; return a number of each."""
        return [float(tensor_N[-1]) for tensor_N in strategy.experimental_local_results(result)]

    graph = tf.function(call, autograph=False)
    sizes = []
    for mib in sizes_mib:
        length = mib * 2**20 // 4
        # Created outside the graph on each device, so that the graph neither copies nor folds them.
        ones = strategy.run(lambda length=length: tf.ones([length], tf.float32))
        results = finish(graph(ones))  # traces the graph, and NCCL connects the devices
        if len(results) != devices or any(abs(number / devices**CHAIN - 1) > TOLERANCE for number in results):
            raise RunFailed(f"all-reduce of {mib} MiB gave {results}, expected {devices}^{CHAIN} on {devices} devices")
        times_s = []
        for _ in range(CALLS):
            began = time.perf_counter()
            finish(graph(ones))
            times_s.append((time.perf_counter() - began) / CHAIN)
        seconds = statistics.median(times_s)
        gb_s = bus_bandwidth(length * 4, seconds, devices)
        sizes.append({"mib": mib, "seconds": seconds, "bus_gb_s": gb_s})
    return {"devices": names, "sizes": sizes}


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.bandwidth", description="The all-reduce between GPUs, measured."
    )
    parser.add_argument("--devices", type=int, required=True, help="number of GPUs or logical CPUs")
    parser.add_argument("--mib", type=int, nargs="+", default=SIZES_MIB, help="sizes in MiB (%(default)s)")
    options = parser.parse_args(arguments)
    variables.set_defaults()
    try:
        if options.devices < 2:
            raise UsageError(f"--devices {options.devices}: expected 2 or more")
        print(json.dumps(measure(options.devices, options.mib)))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
