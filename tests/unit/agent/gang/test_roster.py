"""Tests of what the hub tells the agents, and when (cluster/agent/gang/roster.py)."""

import pytest

from cluster.agent.gang.roster import urgent


@pytest.mark.parametrize(
    ("change", "waited_for"),
    [
        ({"absent": ["worker-1"]}, False),  # they come one by one: a message to all for each would be N^2
        ({"absent": []}, True),
        ({"unlinked": ["worker-1"]}, False),
        ({"number": 1}, True),
        ({"stop": {"by": "a user"}}, True),
        ({"outcome": {"state": "failed", "time": 1.0}}, True),
    ],
)
def test_only_what_others_wait_for_is_urgent(change, waited_for):
    digest = {"number": 0, "begun": None, "outcome": None, "stop": None, "unlinked": [], "absent": None}
    assert waited_for == (urgent(digest) != urgent(digest | change))
