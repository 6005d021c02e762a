"""Flipped bits in real runs: each must be found and its task named, and a run without any must raise no alarm."""

import os
import re
import secrets

import pytest

from cluster.host.control import chaos
from tests.e2e.scenario import SLOW_MACHINE_S, summary
from tests.e2e.test_storms import TRAINING, start

pytestmark = [pytest.mark.usefixtures("data"), pytest.mark.long, pytest.mark.timeout(2 * SLOW_MACHINE_S)]

FLIPS = 10
UNDISTURBED_STEPS = 20_000

SMALL = """
from tensorflow import keras

def model(shape, outputs):
    layers = [keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(outputs)])
"""


@pytest.mark.parametrize(
    ("words", "flips"),
    [
        pytest.param("--workers=2", 1, marks=pytest.mark.extended),
        ("--workers=1", FLIPS),
        ("--workers=3", FLIPS),
        ("--workers=2 --loop=fit", FLIPS),
        ("--workers=2 --bitwise-elastic=6", FLIPS),
        ("--workers=2 --micro-batches=2 --no-memory-snapshots --checkpoint-every=20", FLIPS),
        ("--workers=2 --check-replicas=10", FLIPS),
        ("--workers=0 --devices=2", FLIPS),
        ("--workers=0 --devices=2 --loop=fit", FLIPS),
        ("--workers=0 --devices=4", FLIPS),
    ],
)
def test_every_flipped_bit_must_be_found_and_its_task_named(clusters, words, flips):
    """STORM_SEED repeats the tasks and steps of a failure."""
    seed = int(os.environ.get("STORM_SEED") or secrets.randbits(31))
    print(f"STORM_SEED={seed}")
    run = start(clusters, "-".join(["flips", *re.findall(r"\w+", words)])[:40], *words.split())
    assert [None] * flips == [result.ended for result in chaos.inject_all(run, flips, seed, ["flip"])]
    clusters.check_bits(run, *words.split(), training=TRAINING)
    flipped = [event for event in run.events() if event.event == "flipped"]
    restarts = summary(run)["restarts"]
    assert flips == len(flipped) == len(restarts)
    for flip, restart in zip(flipped, restarts, strict=True):
        assert "silent corruption" in restart["cause"], restart
        assert flip.task in restart["cause"], (flip, restart)
        assert flip.task == restart["task"] or len(run.load_cluster().members) == 2, (flip, restart)
        resumed = [event for event in run.events() if event.generation == restart["generation"]]
        assert flip.step >= next(event.step for event in resumed if event.event in ("restored", "initialized"))


@pytest.mark.parametrize(
    "words",
    ["--workers=1", "--workers=2", "--workers=1 --loop=fit", "--workers=0 --devices=2", "--workers=1 --precision=fp16"],
)
def test_an_undisturbed_run_must_raise_no_alarm(clusters, tmp_path, words):
    small = clusters.with_modules(tmp_path, small=SMALL)
    length = ("--epochs=1000", f"--max-steps={UNDISTURBED_STEPS}")
    training = (*length, "--model=small:model", "--global-batch=12", "--evaluate-every=5000", "--log-every=1000")
    name = "-".join(["calm", *re.findall(r"\w+", words)])
    run = small.up(name, f"{words} --check-replicas=10", training=training, timeout_s=2 * SLOW_MACHINE_S)
    assert (UNDISTURBED_STEPS, []) == (summary(run)["steps"], summary(run)["restarts"])
