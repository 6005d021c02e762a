"""A pipeline gives the weights of one device that takes the same micro-batches, whatever happens to its stages."""

import os
import signal

import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

STEPS, EVERY = 30, 10
TRAINING = ("--steps-per-loop=5", "--log-every=5", "--evaluate-every=20")
PIPELINE = ("--strategy=pipeline",)
COMMON = ("--runtime=local", "--tensorboard-port=0", f"--checkpoint-every={EVERY}")


def words(name: str, *options: str, steps: int = STEPS) -> tuple[str, ...]:
    before = ("up", f"--name={name}", *COMMON, "--micro-batches=4", *options)
    return (*before, "--", *TRAINING, f"--max-steps={steps}", "--optimizer.clip-norm=0.5")


def test_a_killed_middle_stage_and_continuing_on_one_device_must_not_change_the_weights(clusters):
    clusters.invoke(*words("one-device", "--workers=0"))
    one_device = summary(clusters.run("one-device"))
    options = ("--stages=3", "--schedule=1f1b")
    process = clusters.popen(*words("killed-stage", *PIPELINE, *options, steps=STEPS - 5))
    run = clusters.run("killed-stage")

    def trains() -> bool:
        beat = run.heartbeat("worker-0")
        return beat and beat.state == "training" and beat.step >= EVERY and run.programs("worker-0").exists()

    wait_for(trains, "the middle stage to train", pause_s=0.001)
    os.kill(read_json(run.programs("worker-0"))["program"]["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert 0 == process.returncode, output
    assert ["worker-0"] == [restart["task"] for restart in summary(run)["restarts"]]
    words_after = ("up", f"--resume={run.name}", "--strategy=one", "--runtime=local", "--tensorboard-port=0")
    clusters.invoke(*words_after, "--", f"--max-steps={STEPS}")
    found = summary(run)
    assert one_device["weights_sha256"] == found["weights_sha256"]
    assert one_device["metrics"] == found["metrics"]


@pytest.mark.long
def test_two_pipelines_of_two_stages_must_have_the_weights_of_two_of_one(clusters):
    size = ("--transformer.layers=2", "--transformer.width=32", "--transformer.context=16", "--global-batch=8")
    topologies = {"two-by-two": ("--stages=2", "--workers=3"), "two-by-one": ("--stages=1", "--workers=1")}
    for name, options in topologies.items():
        training = words(name, "--preset=transformer_lm", *PIPELINE, *options, steps=6)
        clusters.invoke(*training, *size, timeout_s=500)
    two, one = (summary(clusters.run(name)) for name in topologies)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["metrics"]["eval_loss"] == pytest.approx(two["metrics"]["eval_loss"], rel=1e-5)
