"""What rewrites a graph must not change the order in which gradients are added up."""

from collections.abc import Iterator

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from train.patches.exact_order import keep_order_of_sums


@pytest.fixture(autouse=True)
def _rewrites_as_before() -> Iterator[None]:
    """Undo what is set for all functions of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.context(), "_config", None)
        patch.setattr(context.context(), "_optimizer_experimental_options", {})
        yield
    tf.config.optimizer.set_experimental_options({})  # has the change noticed


@pytest.mark.parametrize(("micro_batches", "deterministic"), [(1, True), (2, False), (1, False)])
def test_only_what_must_repeat_is_not_rewritten(micro_batches, deterministic):
    keep_order_of_sums(micro_batches, deterministic=deterministic)
    rewrites = context.context().config.graph_options.rewrite_options
    assert (rewrites.memory_optimization == rewrites.NO_MEM_OPT) is (micro_batches > 1 or deterministic)
    assert (rewrites.arithmetic_optimization == rewrites.OFF) is (micro_batches > 1)
