"""A task that was killed continues from the memory of another, or where none has it, from the beginning."""

import functools
import random
import re
from collections.abc import Callable

import pytest

from tests.e2e.scenario import summary

pytestmark = pytest.mark.usefixtures("data")

LENGTH = "-- --max-steps=120"


@pytest.fixture(scope="module")
def undisturbed(clusters) -> Callable[[str], str]:
    """Returns the weights of an undisturbed training of this length; how often it saves changes none."""

    @functools.cache
    def train(options: str) -> str:
        name = "-".join(["calm", *re.findall(r"\w+", options)])
        return summary(clusters.up(name, f"{options} {LENGTH}"))["weights_sha256"]

    return train


@pytest.mark.parametrize(
    ("words", "whole", "source"),
    [
        # What the task lost comes from another.
        pytest.param("--workers=2", True, "memory", marks=pytest.mark.extended),
        pytest.param("--workers=1 --loop=fit", False, "memory", marks=pytest.mark.long),
        pytest.param("--strategy=pipeline --stages=2 --micro-batches=2", False, "memory", marks=pytest.mark.long),
        pytest.param("--strategy=pipeline --stages=2 --micro-batches=2", True, "", marks=pytest.mark.long),
        pytest.param("--workers=1 --no-memory-snapshots", False, "", marks=pytest.mark.long),
    ],
)
def test_a_killed_task_must_continue_from_memory(clusters, undisturbed, words, whole, source):
    """No checkpoint is saved before the fault, so that only memory has the state."""
    name = "-".join([*re.findall(r"\w+", words), f"{whole:d}"])
    run = clusters.up(name, f"--detach {words} --checkpoint-every=1000 {LENGTH}")
    fault = ("chaos", "kill", random.choice(["chief", "worker-0"]), f"--run={name}", "--at-step=40")
    clusters.invoke(*fault, *(["--whole"] if whole else []))
    clusters.invoke("wait", name)
    (restart,) = summary(run)["restarts"]
    assert source == restart.get("restored_from", "")
    assert undisturbed(words) == summary(run)["weights_sha256"]
