"""A schedule computes every micro-batch once, in order, within its bounds; a partition is the best that fits."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.system.errors import UsageError
from train.pipeline import schedule
from train.pipeline.partition import BlockCost, Constraints, compute_stage, partition
from train.pipeline.schedule import Opcode

SIZES = st.tuples(st.sampled_from(schedule.SCHEDULES), st.integers(1, 9), st.integers(1, 20))


def computed(programs, forward_s, backward_s):
    """Return the end of every forward and backward, in seconds, if receives only wait for their data."""
    clock, ends = [0.0] * len(programs), {}
    for stage, each in schedule.interleave(programs):
        if each.opcode is Opcode.UPDATE:
            continue
        sender = schedule.find_sender(stage, each.opcode, len(programs))
        if sender is not None:
            clock[stage] = max(clock[stage], ends[each.opcode, sender, each.micro_batch])
        clock[stage] += forward_s if each.opcode is Opcode.FORWARD else backward_s
        ends[each.opcode, stage, each.micro_batch] = clock[stage]
    return ends.values()


def of(program, *actions):
    return [each for each in program if each.opcode in actions]


@settings(deadline=None)  # others use this machine, too
@given(SIZES)
def test_each_stage_computes_every_micro_batch_once_in_order_and_never_deadlocks(size):
    name, stages, micro_batches = size
    programs = schedule.build_programs(name, stages, micro_batches)
    assert 2 * stages * micro_batches == len(computed(programs, 1.0, 2.0))
    for program in programs:
        forwards = [each.micro_batch for each in of(program, Opcode.FORWARD)]
        backwards = [each.micro_batch for each in of(program, Opcode.BACKWARD)]
        assert forwards == backwards == list(range(micro_batches))
        order = [(each.opcode, each.micro_batch) for each in program]
        for micro_batch in range(micro_batches):
            assert order.index((Opcode.FORWARD, micro_batch)) < order.index((Opcode.BACKWARD, micro_batch))
        updates = [each.micro_batch for each in of(program, Opcode.UPDATE)]
        assert updates == (forwards if name == "pipedream" else forwards[-1:])
        assert program[-1].opcode is Opcode.UPDATE


@settings(deadline=None)
@given(SIZES)
def test_a_stage_holds_no_more_than_its_bound_and_reaches_it(size):
    name, stages, micro_batches = size
    for stage, program in enumerate(schedule.build_programs(name, stages, micro_batches)):
        held, most = 0, 0
        for each in of(program, Opcode.FORWARD, Opcode.BACKWARD):
            held += 1 if each.opcode is Opcode.FORWARD else -1
            most = max(most, held)
        assert schedule.in_flight(name, stage, stages, micro_batches) == most
        if name != "gpipe":
            assert most <= stages - stage


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 20))
def test_pipedream_gradients_are_stale_by_the_stages_that_follow_and_its_versions_bounded(stages, micro_batches):
    for stage, program in enumerate(schedule.build_programs("pipedream", stages, micro_batches)):
        updates, versions, held, most = 0, {}, set(), 0
        for each in program:
            if each.opcode is Opcode.UPDATE:
                assert min(stages - 1 - stage, each.micro_batch) == updates - versions[each.micro_batch]
                updates += 1
            elif each.opcode is Opcode.FORWARD:
                versions[each.micro_batch] = updates
                held.add(each.micro_batch)
            elif each.opcode is Opcode.BACKWARD:
                held.remove(each.micro_batch)
            most = max(most, len({versions[micro_batch] for micro_batch in held}))
        assert most <= schedule.in_flight("pipedream", stage, stages, micro_batches)


@settings(deadline=None)
@given(st.sampled_from(("gpipe", "1f1b")), st.integers(1, 9), st.integers(1, 20))
def test_the_bubble_of_equal_stages_is_that_of_the_formula(name, stages, micro_batches):
    length = max(computed(schedule.build_programs(name, stages, micro_batches), 1.0, 2.0))
    assert 1 - 3.0 * micro_batches / length == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_stages_that_wait_for_each_other_are_noticed():
    programs = schedule.build_programs("gpipe", 2, 2)
    programs[0] = [each for each in programs[0] if each.opcode is not Opcode.FORWARD]
    with pytest.raises(RuntimeError):
        schedule.interleave(programs)


def blocks(costs, parameter_bytes=0, activation_bytes=0):
    return [
        BlockCost((f"layer_{at}", f"act_{at}"), float(cost), parameter_bytes, 0, activation_bytes, 1)
        for at, cost in enumerate(costs)
    ]


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
    for inner in itertools.combinations(range(1, len(model)), stages - 1):
        ranges = list(itertools.pairwise([0, *inner, len(model)]))
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
        (Constraints(4, "pipedream", 8), 0, 4 * 100 + 4 * 10),
        (Constraints(4, "gpipe", 8, remat=True), 1, 100 + 10 + 8 * 1),
    ],
)
def test_memory_counts_what_the_schedule_holds(constraints, stage, expected):
    model = blocks([1, 1, 1, 1], parameter_bytes=100, activation_bytes=10)
    assert expected == compute_stage(model, constraints, stage, stage, stage + 1).memory_bytes


def test_a_given_cut_overrides_the_best_one_unless_it_exceeds_the_memory():
    found = partition(blocks([1, 1, 1, 9]), Constraints(2), ["layer_1"])
    assert [(0, 1), (1, 4)] == [(stage.first, stage.last) for stage in found]
    with pytest.raises(UsageError, match="stage 1"):
        partition(blocks([1, 1, 1, 1], parameter_bytes=10), Constraints(2, memory_bytes=20), ["layer_1"])


@pytest.mark.parametrize(
    "cut",
    [["layer_9"], ["act_1"], ["layer_0"], ["layer_2", "layer_1"], ["layer_1", "layer_1"], ["layer_1"]],
    ids=["unknown", "inside a block", "the first layer", "out of order", "twice", "too few"],
)
def test_a_cut_that_is_none_is_refused(cut):
    with pytest.raises(UsageError):
        partition(blocks([1, 1, 1, 1]), Constraints(3), cut)
