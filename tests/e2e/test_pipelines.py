"""A pipeline must give the weights of one device that takes the same micro-batches, whatever happens to its stages."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import Clusters, summary
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

STEPS, EVERY = 30, 10
TRAINING = ("--steps-per-loop=5", "--log-every=5", "--evaluate-every=20")
PIPELINE = ("--strategy=pipeline",)
COMMON = ("--runtime=local", "--tensorboard-port=0", f"--checkpoint-every={EVERY}")


def words(name: str, *options: str, steps: int = STEPS) -> tuple[str, ...]:
    before = ("up", f"--name={name}", *COMMON, "--micro-batches=4", *options)
    return (*before, "--", *TRAINING, f"--max-steps={steps}", "--optimizer.clip-norm=0.5")


@pytest.fixture(scope="module")
def one_device(clusters: Clusters) -> dict[str, Any]:
    """The summary of one device that takes the same micro-batches in order."""
    clusters.invoke(*words("one-device", "--workers=0"))
    return summary(clusters.run("one-device"))


def test_a_killed_stage_and_going_on_with_one_device_must_not_change_the_weights(
    clusters: Clusters, one_device: dict[str, Any]
) -> None:
    process = clusters.popen(*words("killed-stage", *PIPELINE, "--stages=2", steps=STEPS - 5))
    run = clusters.run("killed-stage")

    def trains() -> bool:
        beat = run.heartbeats().get("worker-0", {})
        return beat.get("state") == "training" and beat["step"] >= EVERY and run.programs("worker-0").exists()

    wait_for(trains, "the second stage to train", pause_s=0.001)
    os.kill(read_json(run.programs("worker-0"))["program"]["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert 0 == process.returncode, output
    assert ["worker-0"] == [restart["task"] for restart in summary(run)["restarts"]]
    words_after = ("up", f"--resume={run.name}", "--strategy=one", "--tensorboard-port=0")
    clusters.invoke(*words_after, "--", f"--max-steps={STEPS}")
    found = summary(run)
    assert one_device["weights_sha256"] == found["weights_sha256"]
    assert one_device["metrics"] == found["metrics"]


def test_the_devices_of_one_task_must_give_the_same_weights(clusters: Clusters, one_device: dict[str, Any]) -> None:
    clusters.invoke(*words("devices", *PIPELINE, "--workers=0", "--stages=2"))
    assert one_device["weights_sha256"] == summary(clusters.run("devices"))["weights_sha256"]


@pytest.mark.long
def test_pipedream_must_give_the_weights_of_its_simulation_in_one_process(clusters: Clusters) -> None:
    pipedream = [word for word in words("delays", *PIPELINE, "--schedule=pipedream") if "clip" not in word]
    clusters.invoke(*pipedream[:2], "--stages=2", *pipedream[2:])
    alone = [word.replace("delays", "simulated") for word in pipedream]
    clusters.invoke(*alone[:2], "--stages=2", "--workers=0", *alone[2:])
    hashes = {summary(clusters.run(name))["weights_sha256"] for name in ("delays", "simulated")}
    assert 1 == len(hashes)
