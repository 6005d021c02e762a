"""oneDNN's primitives in a model: whether each gives the same bits on every call.

On CPUs oneDNN's kernels can be twice as fast as TensorFlow's own, but a few of them add in an order that varies.
`operations.toml` lists the operations that TensorFlow replaces by oneDNN's. `primitives.toml` lists those that were
measured, forward and gradient, for each `--onednn` that limits the instructions; `benchmarks/primitives.py` renews it.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import tensorflow as tf

TABLE = Path(__file__).with_suffix(".toml")
_OPERATIONS = tomllib.loads(Path(__file__).with_name("operations.toml").read_text())
CONVOLUTIONS = frozenset(_OPERATIONS["convolutions"])
OPERATIONS = CONVOLUTIONS | frozenset(_OPERATIONS["others"])


def find_unverified(graphs: Iterable[tf.Graph]) -> dict[str, list[str]]:
    """Return, for each `--onednn` that limits the instructions, primitives whose bits may vary or were not measured."""
    used = {name for graph in graphs for name in list_primitives(graph)}
    tables = tomllib.loads(TABLE.read_text())
    return {instructions: sorted(used - set(table["repeat"])) for instructions, table in tables.items()}


def list_primitives(graph: tf.Graph) -> set[str]:
    """Return the primitives of a graph and the functions that it calls, such as `Conv2D 1x1 strided`."""
    found = {_name(operation) for operation in graph.get_operations() if operation.type in OPERATIONS}
    for function in graph.as_graph_def().library.function:
        types = {node.op for node in function.node_def} & OPERATIONS
        found |= {f"{kind} of unknown shape" if kind in CONVOLUTIONS else kind for kind in types}
    return found


def _name(operation: tf.Operation) -> str:
    if operation.type not in CONVOLUTIONS:
        return operation.type
    kernel = operation.inputs[1].shape[: 3 if "3D" in operation.type else 2]
    size = "1x1" if set(kernel) == {1} else "larger" if kernel.is_fully_defined() else "of unknown shape"
    strided = " strided" if max(operation.get_attr("strides")) > 1 else ""
    dilated = " dilated" if max(operation.get_attr("dilations")) > 1 else ""
    return f"{operation.type} {size}{strided}{dilated}"
