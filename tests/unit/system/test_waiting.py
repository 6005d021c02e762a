"""Waiting for a condition is bounded."""

from cluster.system.waiting import wait_until


def test_a_condition_is_looked_at_until_it_holds():
    looks = iter([False, False, True])
    assert wait_until(lambda: next(looks), timeout_s=300, poll_s=0)
    assert [] == list(looks)


def test_a_condition_that_does_not_hold_in_time_is_looked_at_once_at_least():
    looks = []
    assert not wait_until(lambda: looks.append(1), timeout_s=0, poll_s=0)
    assert looks
