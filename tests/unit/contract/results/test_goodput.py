"""Where a run's wall time went, from made-up ledgers and failures."""

from typing import Any

import pytest

from cluster.contract.results import goodput
from cluster.contract.run.records import TimeLedger


def ledger(generation: int, began: float, first_step_at: float | None, updated_at: float, **values: Any) -> TimeLedger:
    """Return the chief's ledger of a generation, in seconds from the run's start."""
    seconds = {"input": 0.0, "compute": 0.0, "save": 0.0, "evaluate": 0.0} | values.pop("seconds", {})
    known = {"first": 0, "step": 0, "timed_steps": 0, "seconds": seconds} | values
    return TimeLedger(generation=generation, began=began, first_step_at=first_step_at, updated_at=updated_at, **known)


def split(ended: float, *ledgers: TimeLedger, failures: dict[int, float] | None = None) -> dict[str, float]:
    """Return the parts that are not 0, once they are all there and add up."""
    parts = goodput.split(0.0, ended, ledgers, failures or {})
    assert parts is not None
    assert list(goodput.PARTS) == list(parts)
    assert ended == pytest.approx(sum(parts.values()), abs=0.01)
    return {name: seconds for name, seconds in parts.items() if seconds}


WORK = {"input": 2.0, "compute": 60.0, "save": 3.0, "evaluate": 5.0}


def test_a_run_without_a_failure():
    whole = ledger(0, 8.0, 12.0, 90.0, step=101, timed_steps=100, seconds=WORK)
    assert {"start": 8.0, "compile": 4.0, **WORK, "other": 18.0} == split(100.0, whole)


def test_a_generation_that_was_killed_counts_and_its_lost_steps_are_lost():
    """40 of 100 timed steps are done again: 40 % of what was trained is lost, of input and compute alike."""
    killed = ledger(0, 8.0, 12.0, 79.0, step=101, timed_steps=100, seconds=WORK)
    after = ledger(1, 88.0, 90.0, 99.0, first=61, step=66, timed_steps=4, seconds={"compute": 9.0})
    assert {
        "start": 8.0, "compile": 4.0, "input": 1.2, "compute": 45.0, "save": 3.0, "evaluate": 5.0,
        "lost": 24.8, "restart": 10.0, "other": 9.0,
    } == split(110.0, killed, after, failures={1: 80.0})  # fmt: skip


def test_failures_on_the_way_back_are_one_restart():
    """Of generation 1 the chief recorded nothing, and generation 2 never finished a step."""
    ledgers = [
        ledger(0, 5.0, 6.0, 20.0, step=11, timed_steps=10, seconds={"compute": 14.0}),
        ledger(2, 35.0, None, 35.0, first=11, step=11),
        ledger(3, 45.0, 50.0, 60.0, first=11, step=21, timed_steps=9, seconds={"compute": 10.0}),
    ]
    expected = {"start": 5.0, "compile": 1.0, "compute": 24.0, "restart": 30.0}
    assert expected == split(60.0, *ledgers, failures={1: 20.0, 2: 30.0, 3: 40.0})


def test_a_run_that_never_came_back_was_restarting_to_its_end():
    only = ledger(0, 5.0, 6.0, 20.0, step=1)
    assert {"start": 5.0, "compile": 1.0, "restart": 40.0, "other": 14.0} == split(60.0, only, failures={1: 20.0})


def test_a_first_step_that_failed_was_compiling_until_then():
    only = ledger(0, 5.0, None, 5.0)
    assert {"start": 5.0, "compile": 7.0, "restart": 8.0} == split(20.0, only, failures={1: 12.0})
    assert {"start": 5.0, "compile": 15.0} == split(20.0, only)


def test_a_run_that_was_scaled_starts_again():
    ledgers = [
        ledger(0, 5.0, 6.0, 20.0, step=11, timed_steps=10, seconds={"compute": 14.0}),
        ledger(1, 27.0, 29.0, 40.0, first=11, step=21, timed_steps=9, seconds={"compute": 11.0}),
    ]
    assert {"start": 12.0, "compile": 3.0, "compute": 25.0} == split(40.0, *ledgers)


def test_ledgers_before_this_start_do_not_count():
    before, now = ledger(0, -90.0, -80.0, -20.0, seconds=WORK), ledger(1, 6.0, 7.0, 10.0)
    assert {"start": 6.0, "compile": 1.0, "other": 3.0} == split(10.0, before, now)


def test_parts_are_no_more_than_the_whole_and_never_negative_where_two_clocks_disagree():
    too_long = ledger(0, 1.0, 2.0, 10.0, step=5, timed_steps=4, seconds={"compute": 50.0})
    assert {"start": 1.0, "compile": 1.0, "compute": 8.0} == split(10.0, too_long)
    again = ledger(1, 9.0, 10.0, 12.0, first=1, step=2, timed_steps=1, seconds={"compute": 1.0})
    parts = split(20.0, ledger(0, 5.0, 6.0, 20.0), again, failures={1: 11.0})
    assert not [part for part, seconds in parts.items() if seconds < 0]
    assert "restart" not in split(20.0, ledger(0, 5.0, 6.0, 20.0), failures={1: 20.01})


def test_goodput_is_the_share_of_steps_that_count_with_their_input():
    done = ledger(0, 5.0, 6.0, 100.0, step=30, timed_steps=30, seconds=WORK)
    assert 0.62 == pytest.approx(goodput.share(goodput.split(0.0, 100.0, [done], {})))
    assert goodput.split(0.0, 10.0, [], {1: 3.0}) is goodput.share(None) is None  # the chief recorded nothing
