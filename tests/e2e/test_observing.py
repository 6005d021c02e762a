"""What is seen of a run while it trains, which must change nothing of it."""

import pytest

from cluster.contract.run.folder import RunFolder
from tests.e2e.scenario import ENDLESS, step_of, summary
from tests.support.waiting import wait_for

FEWEST_STEPS = 40
"""Enough to have an undisturbed step timed."""


@pytest.fixture(scope="module")
def seen(clusters) -> RunFolder:
    """A run of which worker-0 was profiled while it trained."""
    run = clusters.up("seen", "--workers=1", "--detach", "--", *ENDLESS)
    lines = clusters.invoke("profile", "worker-0", "--steps", "3", "--run", "seen").splitlines()
    (head,) = [line for line in lines if line.startswith("worker-0: steps ")]
    assert head.endswith(" traced (5, 3 steps requested: whole calls of the training are traced)")
    wait_for(lambda: step_of(run) >= FEWEST_STEPS, f"step {FEWEST_STEPS}")
    clusters.invoke("stop", "seen")
    return run


@pytest.fixture(scope="module")
def unseen(clusters, seen) -> RunFolder:
    """A run of as many steps that nobody looked at."""
    return clusters.up("unseen", f"--workers=1 -- --max-steps {summary(seen)['steps']}")


def test_profiling_worker_0_must_leave_a_trace_and_not_change_the_bits(clusters, seen, unseen):
    (trace,) = (seen.tensorboard("worker-0") / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
    assert not list(seen.tensorboard("chief").glob("plugins/profile/*"))
    assert summary(unseen)["weights_sha256"] == summary(seen)["weights_sha256"]
    refused = clusters.invoke("profile", "worker-0", "--run", "seen", expect=2)
    assert "run 'seen' has ended, so nothing trains in it" in refused


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
