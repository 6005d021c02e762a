"""The tour, from its first command to its last."""

from __future__ import annotations

import pytest

from cluster.host.control import tour
from tests.e2e.scenario import Clusters


@pytest.mark.long
@pytest.mark.usefixtures("data")
def test_a_tour_must_end_with_the_same_weights(clusters: Clusters) -> None:
    output = clusters.invoke("tour", "--yes", timeout_s=480)
    for step in tour.STEPS:
        assert f"$ {step.command}" in output
    assert "noticed after" in output
    assert "identical: " in output
