"""TensorFlow's operations that draw random numbers from a state of the process.

After a restart they begin again, and every task draws the same, so that neither bits nor masks are those promised.
"""

import functools
from collections.abc import Iterator

import tensorflow as tf

from cluster.system.terminal import warn

DRAWING = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "RngReadAndSkip",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "StatefulRandomBinomial",
        "TruncatedNormal",
    }
)
ASSIGNING = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"})
"""In a dataset, those of a random layer of Keras, which counts its draws."""


def warn_of_drawing(where: str, graph: tf.Graph) -> None:
    """Warn once of a graph that draws random numbers; `where` names its function."""
    if drawing := find_operations(graph) & DRAWING:
        _warn(where, min(drawing))


def warn_of_assigning(where: str, graph: tf.Graph) -> None:
    """Warn of a function that assigns variables other than the states of Keras's generators, which steps replace."""
    others = [variable for variable in graph.variables if "seed_generator" not in variable.name]
    if others and find_operations(graph) & ASSIGNING:
        problem = "which starts over after a restart, and which evaluations assign, too"
        warn(f"{where} assigns a variable, {problem}; keep it in a layer of the model")


@functools.cache
def _warn(where: str, operation: str) -> None:
    warn(
        f"{where} draws by TensorFlow's {operation}, which starts over after a restart and is the same in every task; "
        "use keras.random with a keras.random.SeedGenerator"
    )


def find_operations(graph: tf.Graph) -> set[str]:
    """Return the types of such operations in a graph and in the functions that it calls."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    return {node.op for part in nodes for node in part} & (DRAWING | ASSIGNING)


def graphs_of(dataset: tf.data.Dataset) -> Iterator[tf.Graph]:
    """Yield the graphs of the functions of a dataset and of those that it is made of."""
    yield from (function.function.graph for function in dataset._functions())  # neither has a public name
    for source in dataset._inputs():
        yield from graphs_of(source)
