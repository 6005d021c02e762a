"""TensorFlow's operations that draw random numbers from a state of the process.

After a restart they begin again, and every task draws the same, so that neither bits nor masks are those promised.
"""

import tensorflow as tf

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
        "StatefulRandomBinomial",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
        "TruncatedNormal",
    }
)
ASSIGNING = frozenset({"AssignAddVariableOp", "AssignVariableOp"})
"""In a dataset, those of a random layer of Keras, which counts its draws."""


def find_operations(graph: tf.compat.v1.GraphDef, types: frozenset[str] = DRAWING) -> list[str]:
    """Return the types of such operations in a graph and in the functions that it calls."""
    nodes = [graph.node, *(function.node_def for function in graph.library.function)]
    return sorted({node.op for part in nodes for node in part} & types)
