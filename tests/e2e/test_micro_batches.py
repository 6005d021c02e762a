"""`--micro-batches`: the same bits under every strategy that has as many replicas, in both loops, after a resume."""

from __future__ import annotations

import pytest

from tests.e2e.scenario import Clusters, losses, summary

pytestmark = pytest.mark.usefixtures("data")

MICRO = "--micro-batches=4"
STEPS = 12


def test_two_tasks_must_give_the_bits_of_two_devices_also_when_resumed(clusters: Clusters) -> None:
    devices = clusters.up("devices", f"--workers=0 --devices=2 {MICRO} -- --max-steps {STEPS}")
    tasks = clusters.up("tasks", f"--workers=1 {MICRO} -- --max-steps {STEPS // 2}")
    clusters.invoke("up", "--resume=tasks", "--runtime=local", "--tensorboard-port=0", "--", f"--max-steps={STEPS}")
    assert losses(devices) == losses(tasks)
    assert STEPS == len(losses(tasks))
    assert summary(devices)["weights_sha256"] == summary(tasks)["weights_sha256"]


@pytest.mark.long
def test_fit_must_give_the_bits_of_the_custom_loop(clusters: Clusters) -> None:
    """On two tasks, and on one."""
    for name, workers in (("two", 1), ("one", 0)):
        runs = [
            clusters.up(f"{name}-{loop}", f"--workers={workers} --loop={loop} {MICRO} -- --max-steps {STEPS}")
            for loop in ("custom", "fit")
        ]
        assert 1 == len({summary(run)["weights_sha256"] for run in runs})
