"""How fast this process' devices sum a tensor among all of them, in the terms of NCCL's own tests.

python -m train.bandwidth --devices 8        a line of JSON; on logical CPUs where there are fewer GPUs
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
"""Sums in one call, each of the one before, so that the way into the graph and back hardly counts."""
CALLS = 5
TOLERANCE = 1e-3
"""What float32 may lose of a sum of sums."""


def bus_bandwidth(size_bytes: float, seconds: float, devices: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s: what each link carries, whatever the number of devices.

    By the definition of NCCL's tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that it compares with
    theirs and with what the hardware is said to do.
    """
    return 2 * (devices - 1) / devices * size_bytes / seconds / 1e9


def measure(devices: int, sizes_mib: Sequence[int]) -> dict[str, Any]:
    """Return how long an all-reduce under MirroredStrategy takes for each size. Imports TensorFlow.

    Raises:
        PrerequisiteError: this task was given GPUs, and TensorFlow cannot use them.
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
        """Wait for every device; return a number of each."""
        return [float(tensor_N[-1]) for tensor_N in strategy.experimental_local_results(result)]

    graph = tf.function(call, autograph=False)
    sizes = []
    for mib in sizes_mib:
        length = mib * 2**20 // 4
        # Made outside the graph, each on its device, so that the graph neither copies nor folds them.
        ones = strategy.run(lambda length=length: tf.ones([length], tf.float32))
        found = finish(graph(ones))  # traces it, and has NCCL connect the devices
        if len(found) != devices or any(abs(number / devices**CHAIN - 1) > TOLERANCE for number in found):
            raise RunFailed(f"all-reduce of {mib} MiB gave {found}, expected {devices}^{CHAIN} on {devices} devices")
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
    parser.add_argument("--devices", type=int, required=True, help="how many GPUs, or logical CPUs")
    parser.add_argument("--mib", type=int, nargs="+", default=SIZES_MIB, help="sizes in MiB (%(default)s)")
    options = parser.parse_args(arguments)
    variables.set_defaults()
    try:
        if options.devices < 2:
            raise UsageError(f"--devices {options.devices}: expected 2 or more: one has nobody to sum with")
        print(json.dumps(measure(options.devices, options.mib)))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
