"""What is seen of a run while it trains, which must change nothing of it."""

from __future__ import annotations

from cluster.system.json_files import read_json
from tests.e2e.scenario import Clusters, summary

STEPS = 140
LONGER = ("--", "--max-steps", str(STEPS))


def test_profiling_worker_0_must_leave_a_trace_and_not_change_the_bits(clusters: Clusters) -> None:
    expected = summary(clusters.up("unseen", "--workers", "1", *LONGER))
    run = clusters.up("seen", "--workers", "1", "--detach", *LONGER)
    told = clusters.invoke("profile", "worker-0", "--steps", "3", "--run", "seen").splitlines()
    (head,) = [line for line in told if line.startswith("worker-0: steps ")]
    assert head.endswith(" traced (5, 3 steps asked for: whole calls of the training are traced)")
    (trace,) = (run.tensorboard("worker-0") / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
    assert not list(run.tensorboard("chief").glob("plugins/profile/*"))
    assert "succeeded" in clusters.invoke("wait", "seen")
    assert expected["weights_sha256"] == summary(run)["weights_sha256"]
    refused = clusters.invoke("profile", "worker-0", "--run", "seen", expect=2)
    assert "run 'seen' has ended, so nothing trains in it" in refused


def test_every_task_must_tell_its_pace_and_the_chief_where_the_time_went(clusters: Clusters) -> None:
    """Of a whole run, as the test above leaves it."""
    ended = read_json(clusters.run("unseen").summary)
    assert {"chief", "worker-0"} == set(ended["pace"]["tasks"])
    for pace in ended["pace"]["tasks"].values():
        assert 10 < pace["steps"] < STEPS  # the first one compiles, and of short ones a sample is marked
        assert 0 <= pace["input_share"] <= pace["busy_share"] <= 1
        assert pace["step_ms"]["p10"] <= pace["step_ms"]["p50"] <= pace["step_ms"]["max"]
    parts = ended["goodput_split"]
    assert abs(sum(parts.values()) - ended["wall_s"]) < 0.1
    assert all(parts[name] > 0 for name in ("start", "compile", "compute", "save", "evaluate"))
    assert 0 == parts["lost"] == parts["restart"]
