"""Real faults on real runs: every run must go on, and a synchronous one end with the bits of an undisturbed one."""

from __future__ import annotations

import json

import pytest

from cluster.journal import read_json_lines
from cluster.runs import RunFolder
from tests.e2e.scenario import Clusters, summary

pytestmark = pytest.mark.usefixtures("data")

TRAINING = ("--log-every=5", "--steps-per-loop=5", "--evaluate-every=100000")


def start(clusters: Clusters, name: str, *words: str, steps: int, runtime: str = "local") -> RunFolder:
    options = (f"--name={name}", f"--runtime={runtime}", "--tensorboard-port=0", *words)
    clusters.invoke("up", *options, "--detach", "--", *TRAINING, f"--max-steps={steps}", timeout_s=400)
    return clusters.run(name)


def calm(clusters: Clusters, *words: str, steps: int) -> RunFolder:
    run = start(clusters, "calm", *words, steps=steps)
    clusters.invoke("wait", timeout_s=400)
    return run


def test_kills_a_bad_checkpoint_and_a_stop_must_not_change_a_bit(clusters: Clusters) -> None:
    words = ("--workers=1", "--checkpoint-every=10")
    undisturbed = calm(clusters, *words, steps=120)
    clusters.environment |= {"WARM_SPARE": "1", "WARM_SPARE_DELAY_S": "1"}
    run = start(clusters, "stormy", *words, steps=120)
    killed = json.loads(clusters.invoke("chaos", "kill", "worker-0", "--at-step=35", "--json"))
    assert (None, "kill") == (killed["ended"], killed["kind"])
    assert killed["detected_s"] < 2
    assert killed["steps_lost"] <= 10
    damaged = json.loads(clusters.invoke("chaos", "corrupt", "chief", "--at-step=60", "--json"))
    assert 5 <= damaged["steps_lost"] <= 25  # the newest checkpoint was of no use
    assert "is damaged" in run.log("chief").read_text()
    told = clusters.invoke("chaos", "stop", "worker-0", "--at-step=80")
    assert "the run stopped" in told
    assert "stopped" == summary(run)["state"]
    told = clusters.invoke("up", "--resume=stormy", "--runtime=local", "--tensorboard-port=0")
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]
    assert "the same bits as the undisturbed run calm" in told
    assert ["kill", "corrupt", "stop"] == [fault["kind"] for fault in read_json_lines(run.path / "chaos.jsonl")]


@pytest.mark.long
def test_a_storm_of_twenty_faults_must_not_change_a_bit(clusters: Clusters) -> None:
    words = ("--workers=2", "--checkpoint-every=20")
    undisturbed = calm(clusters, *words, "--fresh", steps=800)
    run = start(clusters, "storm", *words, steps=800)
    told = clusters.invoke("chaos", "storm", "--faults=20", "--seed=7", timeout_s=900)
    assert 20 == told.count(" at step "), told
    assert "succeeded" == summary(run)["state"]
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]
    assert "the same bits as the undisturbed run calm" in told


@pytest.mark.long
def test_parameter_servers_must_outlive_a_storm(clusters: Clusters) -> None:
    run = start(clusters, "ps-storm", "--workers=2", "--ps=1", "--checkpoint-every=20", steps=1000)
    clusters.invoke("chaos", "storm", "--faults=10", "--seed=3", timeout_s=900)
    faults = list(read_json_lines(run.path / "chaos.jsonl"))
    assert (10, "succeeded") == (len(faults), summary(run)["state"])
    assert max(fault["steps_lost"] for fault in faults) <= 20


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_containers_must_outlive_what_only_an_engine_can_do(clusters: Clusters) -> None:
    words = ("--workers=1", "--checkpoint-every=20")
    undisturbed = calm(clusters, *words, "--fresh", steps=600)
    run = start(clusters, "contained", *words, steps=600, runtime="docker")
    dealt = ("kill worker-0 --whole", "oom chief", "pause worker-0", "partition worker-0", "slow worker-0")
    for number, fault in enumerate(dealt):
        # Some steps apart: three failures at one step would end the run.
        at_step = f"--at-step={30 * (number + 1)}"
        result = json.loads(clusters.invoke("chaos", *fault.split(), at_step, "--json"))
        assert result["ended"] is None, result
        if result["kind"] == "slow":
            assert result["detected_s"] is None
        else:
            assert result["detected_s"] < 15, result
    clusters.invoke("wait", timeout_s=400)
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]


@pytest.mark.long
def test_a_disk_filled_on_purpose_must_end_the_run_and_be_empty_again(small: Clusters) -> None:
    run = start(small, "full", "--workers=1", "--checkpoint-every=50", steps=900)
    told = small.invoke("chaos", "diskfull", "chief", "--at-step=60")
    assert "the run failed" in told
    assert "the disk is full" in summary(run)["cause"]["error"]
    assert not (small.runs_dir / ".ballast").exists()
    small.invoke("up", "--resume=full", "--runtime=local", "--tensorboard-port=0", "--", "--max-steps=100")
    assert ("succeeded", 100) == (summary(run)["state"], summary(run)["steps"])
