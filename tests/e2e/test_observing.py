"""What is seen of a run from outside while it trains: its metrics, its pace, and a profile, which changes no bit."""

import urllib.error
from typing import Any

import pytest

from cluster.system.ports import free_ports
from tests.e2e.scenario import ENDLESS, step_of, summary
from tests.support.exposition import scrape
from tests.support.waiting import wait_for

FEWEST_STEPS = 40
"""Enough to have an undisturbed step timed."""


@pytest.mark.extended
def test_metrics_and_a_profile_must_show_a_run_while_it_trains_and_not_change_the_bits(clusters):
    (port,) = free_ports(1)
    seen = clusters.up("seen", f"--workers=1 --metrics-port={port} --detach", "--", *ENDLESS)
    page = wait_for(lambda: (page := scrape(port)).get(("tf_cluster_loss",)) and page, "a logged step")
    assert page["tf_cluster_step",] > 0 == page["tf_cluster_restarts_total",]
    lines = clusters.invoke("profile", "worker-0", "--steps", "3", "--run", "seen").splitlines()
    (head,) = [line for line in lines if line.startswith("worker-0: steps ")]
    assert head.endswith(" traced (5, 3 steps requested: whole calls of the training are traced)")
    wait_for(lambda: step_of(seen) >= FEWEST_STEPS, f"step {FEWEST_STEPS}")
    clusters.invoke("stop", "seen")
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    (trace,) = (seen.tensorboard("worker-0") / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
    assert not list(seen.tensorboard("chief").glob("plugins/profile/*"))
    unseen = clusters.up("unseen", f"--workers=1 -- --max-steps {summary(seen)['steps']}")
    assert summary(unseen)["weights_sha256"] == summary(seen)["weights_sha256"]
    check_pace(summary(unseen))


def check_pace(ended: dict[str, Any]) -> None:
    """Check that every task has reported its pace, and the chief where the time went."""
    assert {"chief", "worker-0"} == set(ended["pace"]["tasks"])
    for pace in ended["pace"]["tasks"].values():
        assert 10 < pace["steps"] < ended["steps"]  # the first one compiles, and of short ones a sample is marked
        assert 0 <= pace["input_share"] <= pace["busy_share"] <= 1
        assert pace["step_ms"]["p10"] <= pace["step_ms"]["p50"] <= pace["step_ms"]["max"]
    parts = ended["goodput_split"]
    assert abs(sum(parts.values()) - ended["wall_s"]) < 0.1
    assert all(parts[name] > 0 for name in ("start", "compile", "compute", "save", "evaluate"))
    assert 0 == parts["lost"] == parts["restart"]
