"""Sums and products are computed in the order in which they are written.

Defect: Grappler's arithmetic optimization combines several sums into one, in another order. Its constant folding
multiplies constants first, such as weight decay and learning rate, but not in every graph. Its memory optimization adds
up three or more values in the order in which they arrive, if it estimates that a graph takes more than 200 MB.
Versions: TensorFlow 2.21.0.
Test: tests/unit/train/patches/test_gradients.py::test_only_sums_that_must_repeat_are_not_rewritten
Not applied: without micro-batches, unless the training must be deterministic.
"""

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context  # has no public name


def keep_order_of_sums(micro_batches: int, *, deterministic: bool) -> None:
    """Turn off the optimizations that reorder sums. Call before any graph is built."""
    if micro_batches > 1 or deterministic:
        eager_context = context.context()  # `tf.config` has no option for the memory optimization
        eager_context._config = eager_context._config or config_pb2.ConfigProto()
        rewrites = eager_context._config.graph_options.rewrite_options
        rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
        tf.config.optimizer.set_experimental_options({})  # makes the change take effect
    if micro_batches > 1:
        keep_order_of_operations()


def keep_order_of_operations() -> None:
    """Turn off the optimizations that reorder sums and products of few terms."""
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False, "constant_folding": False})
