"""The tour, from its first command to its last."""

import pytest

from cluster.host.cli.tasks import tour


@pytest.mark.long
@pytest.mark.usefixtures("data")
def test_a_tour_must_end_with_the_same_weights(clusters):
    output = clusters.invoke("tour", "--yes", timeout_s=480)
    for step in tour.STEPS:
        assert f"$ {step.command()}" in output
    assert "noticed after" in output
    assert "identical: " in output
