"""A schedule computes every micro-batch once, in the order of one device, within its bounds, and never deadlocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.pipeline import schedule
from train.pipeline.schedule import Opcode

SIZES = st.tuples(st.sampled_from(schedule.SCHEDULES), st.integers(1, 9), st.integers(1, 20))


def computed(programs, forward_s, backward_s, transfer_s=0.0):
    """Return the end of every forward and backward, in seconds, if receives only wait for their data."""
    clock, ends = [0.0] * len(programs), {}
    for stage, each in schedule.interleave(programs):
        if each.opcode is Opcode.UPDATE:
            continue
        sender = schedule.find_sender(stage, each.opcode, len(programs))
        if sender is not None:
            clock[stage] = max(clock[stage], ends[each.opcode, sender, each.micro_batch] + transfer_s)
        clock[stage] += forward_s if each.opcode is Opcode.FORWARD else backward_s
        ends[each.opcode, stage, each.micro_batch] = clock[stage]
    return ends.values()


def of(program, *actions):
    return [each for each in program if each.opcode in actions]


@settings(deadline=None)  # others use this machine, too
@given(SIZES)
def test_each_stage_computes_every_micro_batch_once_and_forward_before_backward(size):
    name, stages, micro_batches = size
    for program in schedule.build_programs(name, stages, micro_batches):
        forwards = [each.micro_batch for each in of(program, Opcode.FORWARD)]
        backwards = [each.micro_batch for each in of(program, Opcode.BACKWARD)]
        assert forwards == backwards == list(range(micro_batches))
        order = [(each.opcode, each.micro_batch) for each in program]
        for micro_batch in range(micro_batches):
            assert order.index((Opcode.FORWARD, micro_batch)) < order.index((Opcode.BACKWARD, micro_batch))


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
@given(SIZES)
def test_updates_come_once_a_step_or_once_a_micro_batch(size):
    name, stages, micro_batches = size
    for program in schedule.build_programs(name, stages, micro_batches):
        updates = [each.micro_batch for each in of(program, Opcode.UPDATE)]
        assert updates == (list(range(micro_batches)) if name == "pipedream" else [micro_batches - 1])
        assert program[-1].opcode is Opcode.UPDATE


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 20))
def test_pipedream_gradients_are_stale_by_exactly_the_stages_that_follow(stages, micro_batches):
    for stage, program in enumerate(schedule.build_programs("pipedream", stages, micro_batches)):
        updates, versions = 0, {}
        for each in program:
            if each.opcode is Opcode.UPDATE:
                assert min(stages - 1 - stage, each.micro_batch) == updates - versions[each.micro_batch]
                updates += 1
            elif each.opcode is Opcode.FORWARD:
                versions[each.micro_batch] = updates


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 20))
def test_pipedream_stashes_no_more_versions_than_its_bound(stages, micro_batches):
    for stage, program in enumerate(schedule.build_programs("pipedream", stages, micro_batches)):
        updates, held, most = 0, {}, 0
        for each in program:
            if each.opcode is Opcode.FORWARD:
                held[each.micro_batch] = updates
            elif each.opcode is Opcode.BACKWARD:
                del held[each.micro_batch]
            updates += each.opcode is Opcode.UPDATE
            most = max(most, len(set(held.values())))
        assert most <= schedule.weight_versions("pipedream", stage, stages, micro_batches)


@settings(deadline=None)
@given(SIZES, st.floats(0, 5))
def test_no_schedule_deadlocks(size, transfer_s):
    name, stages, micro_batches = size
    programs = schedule.build_programs(name, stages, micro_batches)
    ends = computed(programs, 1.0, 2.0, transfer_s)
    assert len(ends) == 2 * stages * micro_batches


@settings(deadline=None)
@given(st.sampled_from(("gpipe", "1f1b")), st.integers(1, 9), st.integers(1, 20))
def test_the_bubble_of_equal_stages_is_that_of_the_formula(name, stages, micro_batches):
    programs = schedule.build_programs(name, stages, micro_batches)
    length = max(computed(programs, 1.0, 2.0))
    assert 1 - 3.0 * micro_batches / length == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_stages_that_wait_for_each_other_are_noticed():
    programs = schedule.build_programs("gpipe", 2, 2)
    programs[0] = [each for each in programs[0] if each.opcode is not Opcode.FORWARD]
    with pytest.raises(RuntimeError):
        schedule.interleave(programs)


def test_values_come_from_the_stage_before_and_gradients_from_the_stage_after():
    assert [None, 0, 1] == [schedule.find_sender(stage, Opcode.FORWARD, 3) for stage in range(3)]
    assert [1, 2, None] == [schedule.find_sender(stage, Opcode.BACKWARD, 3) for stage in range(3)]
    assert [None] * 3 == [schedule.find_sender(stage, Opcode.UPDATE, 3) for stage in range(3)]
