"""oneDNN's primitives in a model: whether each gives the same bits on every call.

On CPUs oneDNN's kernels can be twice as fast as TensorFlow's own, but a few of them add in an order that varies.
`operations.toml` lists the operations that TensorFlow replaces by oneDNN's. `primitives.toml` lists those that were
measured, forward and gradient, for each `--onednn` that limits the instructions; `benchmarks/primitives.py` renews it.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

TABLE = Path(__file__).with_suffix(".toml")
_OPERATIONS = tomllib.loads(Path(__file__).with_name("operations.toml").read_text())
CONVOLUTIONS = frozenset(_OPERATIONS["convolutions"])
OPERATIONS = CONVOLUTIONS | frozenset(_OPERATIONS["others"])
HALF = {dtype.as_datatype_enum: dtype.name for dtype in (tf.bfloat16, tf.float16)}
"""Types that were not measured, and in which kernels limited to fewer instructions can abort the process."""


def find_unverified(graphs: Iterable[tf.Graph]) -> dict[str, list[str]]:
    """Return, for each `--onednn` that limits the instructions, primitives whose bits may vary or were not measured."""
    used = {name for graph in graphs for name in list_primitives(graph)}
    tables = tomllib.loads(TABLE.read_text())
    return {instructions: sorted(used - set(table["repeat"])) for instructions, table in tables.items()}


def list_primitives(graph: tf.Graph) -> set[str]:
    """Return the primitives of a graph and the functions that it calls, such as `Conv2D 1x1 strided`."""
    found = {_name(operation) for operation in graph.get_operations() if operation.type in OPERATIONS}
    for function in graph.as_graph_def().library.function:
        kinds = {_kind(node) for node in function.node_def if node.op in OPERATIONS}
        found |= {f"{kind} of unknown shape" if kind in CONVOLUTIONS else kind for kind in kinds}
    return found


def _kind(node: Any) -> str:
    """Return the type of a node's operation, and in half precision that of its numbers."""
    half = HALF.get(node.attr["T"].type)
    return f"{node.op} in {half}" if half else str(node.op)


def _name(operation: tf.Operation) -> str:
    kind = _kind(operation.node_def)
    if kind not in CONVOLUTIONS:
        return kind
    kernel = operation.inputs[1].shape[: 3 if "3D" in operation.type else 2]
    size = "1x1" if set(kernel) == {1} else "larger" if kernel.is_fully_defined() else "of unknown shape"
    strided = " strided" if max(operation.get_attr("strides")) > 1 else ""
    dilated = " dilated" if max(operation.get_attr("dilations")) > 1 else ""
    return f"{kind} {size}{strided}{dilated}"
