"""Finds the oneDNN primitives that give the same bits on every call; updates `train/startup/primitives.toml`.

    python -m benchmarks.primitives --instructions avx2 --write

Each primitive and its gradient are computed on random shapes, a thousand times or more with one thread and again with
all, with oneDNN limited to these instructions as by `--onednn`. Between calls, memory is allocated and filled with
other values, and a process with a corrupted heap is aborted. Takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from cluster.system.errors import RunFailed
from cluster.system.messages import counted
from train.startup.preload import LARGEST_ISA

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "LD_PRELOAD": "libc_malloc_debug.so.0",
    "MALLOC_CHECK_": "3",
}
"""The last two end a process whose heap has been corrupted."""
HEAD = """\
# oneDNN's primitives whose bits repeat on every call, and those whose bits vary, by the instructions of its kernels.
# Written by `python -m benchmarks.primitives --write`.
"""


def main(arguments: Sequence[str]) -> int:
    """Measure each kind in two processes, with one thread and with all; write the table, and print what varies."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.primitives")
    parser.add_argument("--instructions", choices=list(LARGEST_ISA), required=True, help="the newest of oneDNN")
    parser.add_argument("--write", action="store_true", help="renew train/startup/primitives.toml")
    parser.add_argument("--draws", type=int, default=40, help="shapes drawn of each kind (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=20, help="calls for each shape (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the shapes (default: %(default)s)")
    parser.add_argument("--only", choices=list(KINDS), help="one kind of primitive (default: all)")
    parser.add_argument("--threads", type=int, help="measure --only in this process")
    options = parser.parse_args(arguments)
    if options.threads:
        _measure(options)
        return 0
    calls: Counter[str] = Counter()
    varied: dict[str, list[str]] = {}
    for kind in [options.only] if options.only else KINDS:
        for threads in (1, len(os.sched_getaffinity(0))):
            for row in _rows(kind, threads, options.instructions, arguments):
                for name in row["names"]:
                    calls[name] += row["calls"]
                    if problem := row["problem"]:
                        varied.setdefault(name, []).append(f"{counted(threads, 'thread')}, {row['shapes']}: {problem}")
        print(f"{kind}: measured", file=sys.stderr, flush=True)
    repeat = sorted(set(calls) - set(varied))
    examples = {name: found[:2] for name, found in sorted(varied.items())}
    print(json.dumps({"calls": {name: calls[name] for name in repeat}, "varied": examples}, indent=2))
    if options.write:
        _write(options.instructions, {"repeat": repeat, "vary": sorted(varied)})
    return 0


def _write(instructions: str, names: dict[str, list[str]]) -> None:
    """Replace the lists of these instructions in the table."""
    from train.startup.primitives import TABLE

    tables = tomllib.loads(TABLE.read_text()) | {instructions: names}
    lines = HEAD.splitlines()
    for title, lists in sorted(tables.items()):
        lines.append(f"[{title}]")
        for key, listed in lists.items():
            lines += [f"{key} = [", *(f"  {json.dumps(name)}," for name in listed), "]"]
    TABLE.write_text("\n".join(lines) + "\n")


def _rows(kind: str, threads: int, instructions: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each drawn shape; if the process crashes, the last row is that of the shape at fault."""
    command = [sys.executable, "-m", "benchmarks.primitives", *arguments, f"--only={kind}", f"--threads={threads}"]
    environment = os.environ | ENVIRONMENT | {"ONEDNN_MAX_CPU_ISA": LARGEST_ISA[instructions]}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE)
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode > 0:
        raise RunFailed(f"{kind}: exit code {done.returncode}")
    if done.returncode < 0:
        rows[-1]["problem"] = f"ended by signal {-done.returncode}"
    return [row for row in rows if row["problem"] is not None]


def _measure(options: argparse.Namespace) -> None:
    """Print a row for each drawn shape before it is computed, and again with the result."""
    import tensorflow as tf

    from train.startup.primitives import list_primitives

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.experimental.enable_op_determinism()
    dice = random.Random(f"{options.seed} {options.only}")  # noqa: S311  # not for cryptography
    for _ in range(options.draws):
        function, shapes = KINDS[options.only](dice)
        arguments = [tf.constant(_numbers(dice, shape)) for shape in shapes]
        forward = tf.function(function).get_concrete_function(*arguments)
        names = sorted(list_primitives(forward.graph)) or [options.only]
        row = {"names": names, "shapes": shapes, "calls": options.calls, "problem": None}
        print(json.dumps(row), flush=True)
        problems = []
        for name, compute in _computations(function, forward, arguments):
            results = set()
            for _ in range(options.calls):
                tf.fill([dice.randrange(1, 400_000)], dice.random() * 1e3)  # another address, other old values
                results.add(sha256(compute().numpy().tobytes()).digest())
            if len(results) > 1:
                problems.append(f"{name} has {len(results)} results")
        print(json.dumps(row | {"problem": ", ".join(problems)}), flush=True)


def _computations(function: Any, forward: Any, arguments: list[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the function and its gradient for each argument, each as a graph that computes nothing else."""
    import tensorflow as tf

    yield "forward", lambda: forward(*arguments)
    upstream = tf.random.stateless_normal(forward.structured_outputs.shape, [1, 2])

    def gradient(number: int, upstream: Any, *arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments[number])
            outputs = function(*arguments)
        return tape.gradient(outputs, arguments[number], output_gradients=upstream)

    for number in range(len(arguments)):
        graph = tf.function(functools.partial(gradient, number)).get_concrete_function(upstream, *arguments)
        yield f"gradient {number}", functools.partial(graph, upstream, *arguments)


def _numbers(dice: random.Random, shape: Sequence[int]) -> Any:
    import numpy as np

    return np.random.default_rng(dice.randrange(2**32)).normal(size=shape).astype("float32")


Drawn = tuple[Callable[..., Any], list[list[int]]]
BATCHES, SIZES, CHANNELS = (1, 2, 5, 16), (5, 7, 8, 14, 16), (1, 3, 8, 16, 20, 32, 64)


def _convolution(
    dice: random.Random, dimensions: int, kernels: Sequence[int], steps: Sequence[int], kind: str = "plain"
) -> Drawn:
    """Draw a convolution over an image or a volume, some with a bias and a ReLU, which TensorFlow fuses."""
    import tensorflow as tf

    kernel, stride = dice.choice(kernels), dice.choice(steps)
    side = dice.choice(SIZES if dimensions == 2 else (4, 6, 9))
    dilation = 2 if stride == 1 and dimensions == 2 and kind == "plain" and dice.random() < 0.25 else 1
    padding = "SAME" if (kernel - 1) * dilation >= side or dice.random() < 0.5 else "VALID"
    batch, given, made = dice.choice(BATCHES), dice.choice(CHANNELS), dice.choice(CHANNELS)
    images, window = [batch, *[side] * dimensions, given], [kernel] * dimensions
    if kind == "plain" and kernel > 1 and dice.random() < 0.2:
        window[0] = 1
    fused, strides = dice.random() < 0.4, [1, *[stride] * dimensions, 1]
    if kind == "transposed":
        spatial = [side * stride] * dimensions if padding == "SAME" else [(side - 1) * stride + kernel] * dimensions
        convolve: Any = tf.nn.conv2d_transpose if dimensions == 2 else tf.nn.conv3d_transpose
        return lambda x, w: convolve(x, w, [batch, *spatial, made], strides, padding), [images, [*window, made, given]]
    if kind == "depthwise":
        many = dice.choice((1, 1, 2))
        return lambda x, w: tf.nn.depthwise_conv2d(x, w, strides, padding), [images, [*window, given, many]]
    convolve = tf.nn.conv2d if dimensions == 2 else tf.nn.conv3d
    filters, dilations = [*window, given, made], [1, *[dilation] * dimensions, 1]

    def function(x: Any, w: Any, bias: Any = None) -> Any:
        outputs = convolve(x, w, strides, padding, dilations=dilations)
        return outputs if bias is None else tf.nn.relu(tf.nn.bias_add(outputs, bias))

    return function, [images, filters, [made]] if fused else [images, filters]


def _sequence_convolution(dice: random.Random) -> Drawn:
    """Draw a convolution over a sequence, which TensorFlow computes as one over an image of one row."""
    import tensorflow as tf

    kernel, stride, length = dice.choice((2, 3, 3, 5, 9)), dice.choice((1, 1, 2, 3)), dice.choice((16, 50, 128))
    dilation = dice.choice((1, 2, 4)) if stride == 1 else 1
    batch, given, made = dice.choice(BATCHES), dice.choice(CHANNELS), dice.choice(CHANNELS)
    padding = "SAME" if (kernel - 1) * dilation >= length or dice.random() < 0.5 else "VALID"
    convolve = functools.partial(tf.nn.conv1d, stride=stride, padding=padding, dilations=dilation)
    return convolve, [[batch, length, given], [kernel, given, made]]


def _pool(dice: random.Random, name: str) -> Drawn:
    import tensorflow as tf

    dimensions = 3 if name.endswith("3d") else 2
    window, stride = dice.choice((2, 2, 3)), dice.choice((1, 2, 2, 3))
    shape = [dice.choice(BATCHES), *[dice.choice((6, 8, 13))] * dimensions, dice.choice(CHANNELS)]
    pool, padding = getattr(tf.nn, name), dice.choice(("SAME", "VALID"))
    return lambda x: pool(x, window, stride, padding), [shape]


def _product(dice: random.Random, *, fused: bool = False) -> Drawn:
    import tensorflow as tf

    rows, inner, columns = (
        dice.choice((1, 7, 32, 192, 300)),
        dice.choice((1, 10, 64, 257, 784)),
        dice.choice((1, 10, 128, 333)),
    )
    if fused:
        activation = dice.choice((tf.nn.relu, tf.nn.gelu, tf.nn.tanh, tf.nn.sigmoid, tf.nn.elu, tf.nn.leaky_relu))
        shapes = [[rows, inner], [inner, columns], [columns]]
        return lambda x, w, bias: activation(tf.nn.bias_add(tf.matmul(x, w), bias)), shapes
    return tf.matmul, [[rows, inner], [inner, columns]]


def _batched_product(dice: random.Random) -> Drawn:
    import tensorflow as tf

    batch, length = [dice.choice((1, 3, 16)), dice.choice((1, 4))], dice.choice((5, 16, 64))
    width = dice.choice((8, 32, 50))
    return tf.matmul, [[*batch, length, width], [*batch, width, dice.choice((5, 16, 64))]]


def _einsum(dice: random.Random) -> Drawn:
    import tensorflow as tf

    batch, length, heads, width = (
        dice.choice((1, 4, 16)),
        dice.choice((5, 16, 64)),
        dice.choice((1, 2, 4)),
        dice.choice((8, 32)),
    )
    equation, shapes = dice.choice(
        (
            ("abc,cde->abde", [[batch, length, width], [width, heads, width]]),
            ("aecd,abcd->acbe", [[batch, length, heads, width], [batch, length, heads, width]]),
            ("acbe,aecd->abcd", [[batch, heads, length, length], [batch, length, heads, width]]),
            ("abcd,cde->abe", [[batch, length, heads, width], [heads, width, 2 * width]]),
        )
    )
    return lambda x, y: tf.einsum(equation, x, y), shapes


def _batch_norm(dice: random.Random) -> Drawn:
    import tensorflow as tf

    channels, activation = dice.choice(CHANNELS), dice.choice((tf.identity, tf.nn.relu))
    images = [dice.choice(BATCHES[1:]), *[dice.choice(SIZES)] * 2, channels]

    def function(x: Any, scale: Any, offset: Any) -> Any:
        return activation(tf.compat.v1.nn.fused_batch_norm(x, scale, offset)[0])

    return function, [images, [channels], [channels]]


def _elementwise(function: Callable[[Any], Any]) -> Callable[[random.Random], Drawn]:
    return lambda dice: (function, [[dice.choice(BATCHES), dice.choice(SIZES), dice.choice(CHANNELS)]])


def _norm(x: Any, axes: Sequence[int]) -> Any:
    """Normalize as Keras's layers do, which TensorFlow may fuse."""
    import tensorflow as tf

    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def _named(name: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        import tensorflow as tf

        return getattr(tf.nn, name)(x)

    return function


def _mish(x: Any) -> Any:
    import tensorflow as tf

    return x * tf.tanh(tf.math.softplus(x))


def _joined(x: Any) -> Any:
    import tensorflow as tf

    return tf.concat([tf.transpose(x, [0, 2, 1]), tf.transpose(x * 2.0, [0, 2, 1])], axis=-1)


def _convolutions() -> dict[str, Callable[[random.Random], Drawn]]:
    """Return a kind for each size and stride, so that one that corrupts memory does not affect the others."""
    kinds: dict[str, Callable[[random.Random], Drawn]] = {}
    for kind, dimensions in (("plain", 2), ("transposed", 2), ("depthwise", 2), ("plain", 3), ("transposed", 3)):
        for size, kernels in (("1x1", (1,)), ("larger", (2, 3, 3, 5, 7) if dimensions == 2 else (2, 3))):
            for strided, steps in (("", (1,)), (" strided", (2, 2, 3))):
                name = f"{kind} convolution {dimensions}D {size}{strided}"
                kinds[name] = functools.partial(
                    _convolution, dimensions=dimensions, kernels=kernels, steps=steps, kind=kind
                )
    return kinds


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    **_convolutions(),
    "convolution over a sequence": _sequence_convolution,
    "max pooling": lambda dice: _pool(dice, "max_pool2d"),
    "average pooling": lambda dice: _pool(dice, "avg_pool2d"),
    "max pooling 3D": lambda dice: _pool(dice, "max_pool3d"),
    "average pooling 3D": lambda dice: _pool(dice, "avg_pool3d"),
    "product": _product,
    "product fused": lambda dice: _product(dice, fused=True),
    "batched product": _batched_product,
    "einsum": _einsum,
    "batch normalization": _batch_norm,
    "softmax": _elementwise(_named("softmax")),
    "swish": _elementwise(_named("silu")),
    "gelu": _elementwise(_named("gelu")),
    "mish": _elementwise(_mish),
    "layer normalization": _elementwise(lambda x: _norm(x, [-1])),
    "instance normalization": _elementwise(lambda x: _norm(x, [1])),
    "transposition": _elementwise(_joined),
}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
