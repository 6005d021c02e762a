"""Real faults on real runs: every run must go on, and a synchronous one end with the bits of an undisturbed one."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal

import pytest

from cluster.run.folder import RunFolder
from cluster.runtime import registry
from cluster.system.journal import read_json_lines
from tests.e2e.scenario import Clusters, summary
from tests.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("data")]

STORM_STEPS = 40
TRAINING = ("--log-every=5", "--steps-per-loop=5", "--evaluate-every=100000")

STORMS = {
    "multiworker": (("--workers=2",), 600),
    "fit": (("--workers=2", "--loop=fit"), 600),
    "elastic": (("--workers=2", "--bitwise-elastic=4"), 600),
    "ps": (("--workers=2", "--ps=1", "--evaluator"), 1000),
    "one": (("--strategy=one",), 2000),
    "mirrored": (("--strategy=mirrored", "--devices=2"), 2000),
    "central": (("--strategy=central", "--devices=2"), 2000),
}
"""What is started for each strategy, and for how many steps: there must be room for the faults."""


def start(
    clusters: Clusters, name: str, *words: str, steps: int, runtime: str = "local", more: tuple[str, ...] = ()
) -> RunFolder:
    options = (f"--name={name}", f"--runtime={runtime}", "--tensorboard-port=0", *words)
    clusters.invoke("up", *options, "--detach", "--", *TRAINING, f"--max-steps={steps}", *more, timeout_s=400)
    return clusters.run(name)


def calm(clusters: Clusters, *words: str, steps: int, more: tuple[str, ...] = ()) -> RunFolder:
    run = start(clusters, "calm", *words, steps=steps, more=more)
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
@pytest.mark.parametrize("strategy", STORMS)
def test_a_storm_of_any_seed_must_lose_no_run_and_change_no_bit(clusters: Clusters, strategy: str) -> None:
    """At the defaults; STORM_SEED repeats the faults of a failure."""
    words, steps = STORMS[strategy]
    seed = int(os.environ.get("STORM_SEED") or secrets.randbits(31))
    print(f"STORM_SEED={seed}")
    more = ("--epochs=10",)
    run = start(clusters, f"any-{strategy}", *words, steps=steps, more=more)
    told = clusters.invoke("chaos", "storm", "--faults=8", f"--seed={seed}", timeout_s=900)
    assert ("succeeded", steps) == (summary(run)["state"], summary(run)["steps"]), told
    if strategy != "ps":
        undisturbed = calm(clusters, *words, "--fresh", steps=steps, more=more)
        assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"], told


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


@pytest.mark.long
def test_faults_five_steps_apart_must_let_the_run_move_on(clusters: Clusters) -> None:
    """At the defaults, and with steps slow enough to be counted from outside."""
    words, slow = ("--workers=2", "--fresh"), ("--global-batch=2400", "--steps-per-loop=25")
    undisturbed = calm(clusters, *words, steps=STORM_STEPS, more=slow)
    run = start(clusters, "five-apart", *words, steps=STORM_STEPS, more=slow)
    kills = itertools.cycle(["worker-0", "chief", "worker-1"])
    firsts: list[int] = []
    while not run.summary.exists():
        generation = run.generation
        wait_for(lambda at=generation: five_steps_after(run, at) is not False, "five steps, or the end", timeout_s=120)
        if first := five_steps_after(run, generation):
            firsts.append(first[0])
            registry.of(run).faults(run).signal(next(kills), signal.SIGKILL, "program")
            wait_for(lambda at=generation: run.generation > at or run.summary.exists(), "the kill to be noticed")
    assert len(firsts) >= 4, firsts
    assert all(later > before for before, later in zip(firsts, firsts[2:], strict=False)), firsts
    assert "succeeded" == summary(run)["state"]
    assert summary(undisturbed)["weights_sha256"] == summary(run)["weights_sha256"]
    assert summary(run)["checkpoint_every_s"] < summary(undisturbed)["checkpoint_every_s"]


def five_steps_after(run: RunFolder, generation: int) -> list[int] | bool:
    """Return where a generation began once it has done five steps; an empty list once the run has ended."""
    if run.summary.exists():
        return []
    begun = ("restored", "initialized")
    firsts = [e["step"] for e in run.events() if e["generation"] == generation and e["event"] in begun]
    beat = run.heartbeats().get("chief", {})
    return firsts if firsts and beat["generation"] == generation and beat["step"] >= firsts[0] + 5 else False
