"""What is seen of a run from outside while it trains: its metrics, and a profile, which changes no bit."""

import urllib.error

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.ports import free_ports
from tests.e2e.scenario import ENDLESS, step_of, summary
from tests.support.exposition import scrape
from tests.support.waiting import wait_for

FEWEST_STEPS = 40
"""Enough to have an undisturbed step timed."""


@pytest.fixture(scope="module")
def training(clusters) -> RunFolder:
    """A run that trains until it is stopped."""
    return clusters.up("seen", "--workers=1", "--detach", "--", *ENDLESS)


@pytest.mark.extended
def test_metrics_must_be_served_while_a_run_trains_through_a_fault_and_until_it_stops(clusters):
    (port,) = free_ports(1)
    clusters.up("scraped", f"--metrics-port={port} --detach", "--", *ENDLESS)
    first = wait_for(lambda: (page := scrape(port)).get(("tf_cluster_loss",)) and page, "a logged step")
    assert first["tf_cluster_step",] > 0 == first["tf_cluster_restarts_total",]
    clusters.invoke("chaos", "kill", "chief", "--run=scraped")
    after = wait_for(lambda: (page := scrape(port))["tf_cluster_step",] > first["tf_cluster_step",] and page, "a step")
    assert (1, 1) == (after["tf_cluster_generation",], after["tf_cluster_restarts_total",])
    clusters.invoke("stop", "scraped")
    with pytest.raises(urllib.error.URLError):
        scrape(port)


@pytest.fixture(scope="module")
def seen(clusters, training) -> RunFolder:
    """The run, of which worker-0 was profiled while it trained."""
    lines = clusters.invoke("profile", "worker-0", "--steps", "3", "--run", "seen").splitlines()
    (head,) = [line for line in lines if line.startswith("worker-0: steps ")]
    assert head.endswith(" traced (5, 3 steps requested: whole calls of the training are traced)")
    wait_for(lambda: step_of(training) >= FEWEST_STEPS, f"step {FEWEST_STEPS}")
    clusters.invoke("stop", "seen")
    return training


@pytest.fixture(scope="module")
def unseen(clusters, seen) -> RunFolder:
    """A run of as many steps that nobody looked at."""
    return clusters.up("unseen", f"--workers=1 -- --max-steps {summary(seen)['steps']}")


@pytest.mark.long
def test_profiling_worker_0_must_leave_a_trace_and_not_change_the_bits(clusters, seen, unseen):
    (trace,) = (seen.tensorboard("worker-0") / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
    assert not list(seen.tensorboard("chief").glob("plugins/profile/*"))
    assert summary(unseen)["weights_sha256"] == summary(seen)["weights_sha256"]
    refused = clusters.invoke("profile", "worker-0", "--run", "seen", expect=2)
    assert "run 'seen' has ended, so nothing trains in it" in refused


@pytest.mark.long
def test_every_task_must_report_its_pace_and_the_chief_where_the_time_went(unseen):
    ended = summary(unseen)
    assert {"chief", "worker-0"} == set(ended["pace"]["tasks"])
    for pace in ended["pace"]["tasks"].values():
        assert 10 < pace["steps"] < ended["steps"]  # the first one compiles, and of short ones a sample is marked
        assert 0 <= pace["input_share"] <= pace["busy_share"] <= 1
        assert pace["step_ms"]["p10"] <= pace["step_ms"]["p50"] <= pace["step_ms"]["max"]
    parts = ended["goodput_split"]
    assert abs(sum(parts.values()) - ended["wall_s"]) < 0.1
    assert all(parts[name] > 0 for name in ("start", "compile", "compute", "save", "evaluate"))
    assert 0 == parts["lost"] == parts["restart"]
