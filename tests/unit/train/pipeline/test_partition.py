"""The partition is the best one there is, fits the memory, follows a given cut, and refuses what cannot be."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.system.errors import UsageError
from train.pipeline.partition import BlockCost, Constraints, compute_stage, partition


def blocks(costs, parameter_bytes=0, activation_bytes=0):
    return [
        BlockCost((f"layer_{at}", f"act_{at}"), float(cost), parameter_bytes, 0, activation_bytes, 1)
        for at, cost in enumerate(costs)
    ]


def all_borders(count, stages):
    for inner in itertools.combinations(range(1, count), stages - 1):
        yield [0, *inner, count]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from(("gpipe", "1f1b", "pipedream")),
    st.booleans(),
    st.none() | st.integers(1, 300),
)
def test_the_best_cut_that_fits_the_memory_is_found_or_refused(sizes, stages, schedule, remat, limit):
    if stages > len(sizes):
        return
    model = [BlockCost((f"layer_{at}",), float(c), p, p, a, 1) for at, (c, p, a) in enumerate(sizes)]
    plan = Constraints(stages, schedule, 4, remat, limit)
    fitting, most = [], math.inf if limit is None else limit
    for borders in all_borders(len(model), stages):
        ranges = list(itertools.pairwise(borders))
        if all(compute_stage(model, plan, number, *each).memory_bytes <= most for number, each in enumerate(ranges)):
            fitting.append(max(sum(block.flops for block in model[a:b]) for a, b in ranges))
    if not fitting:
        with pytest.raises(UsageError):
            partition(model, plan)
        return
    found = partition(model, plan)
    assert [layer for stage in found for layer in stage.layers] == [layer for block in model for layer in block.layers]
    assert max(stage.flops for stage in found) == min(fitting)
    assert all(stage.memory_bytes <= most for stage in found)


@pytest.mark.parametrize(
    ("constraints", "stage", "expected"),
    [
        (Constraints(4, "gpipe", 8), 0, 100 + 8 * 10),
        (Constraints(4, "1f1b", 8), 0, 100 + 4 * 10),
        (Constraints(4, "1f1b", 8), 3, 100 + 10),
        (Constraints(4, "pipedream", 8), 0, 4 * 100 + 4 * 10),
        (Constraints(4, "gpipe", 8, remat=True), 1, 100 + 10 + 8 * 1),
    ],
)
def test_memory_counts_what_the_schedule_holds(constraints, stage, expected):
    model = blocks([1, 1, 1, 1], parameter_bytes=100, activation_bytes=10)
    assert expected == compute_stage(model, constraints, stage, stage, stage + 1).memory_bytes


def test_a_given_cut_overrides_the_best_one():
    found = partition(blocks([1, 1, 1, 9]), Constraints(2), ["layer_1"])
    assert [(0, 1), (1, 4)] == [(stage.first, stage.last) for stage in found]


@pytest.mark.parametrize(
    "cut",
    [["layer_9"], ["act_1"], ["layer_0"], ["layer_2", "layer_1"], ["layer_1", "layer_1"], ["layer_1"]],
    ids=["unknown", "inside a block", "the first layer", "out of order", "twice", "too few"],
)
def test_a_cut_that_is_none_is_refused(cut):
    with pytest.raises(UsageError):
        partition(blocks([1, 1, 1, 1]), Constraints(3), cut)


def test_a_given_cut_that_exceeds_the_memory_is_refused():
    with pytest.raises(UsageError, match="stage 1"):
        partition(blocks([1, 1, 1, 1], parameter_bytes=10), Constraints(2, memory_bytes=20), ["layer_1"])
