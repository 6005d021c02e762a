"""A task that was killed continues from the memory of another, or where none has it, from the beginning."""

import functools
import random
import re
import signal
from collections.abc import Callable

import pytest

from cluster.system import processes
from cluster.system.json_files import read_json
from tests.e2e.scenario import ENDLESS, SLOW_MACHINE_S, step_of, summary
from tests.support.waiting import wait_for

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


@pytest.mark.parametrize("killed", ["program", pytest.param("agent", marks=pytest.mark.long)])
@pytest.mark.parametrize("failures", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_stop_during_a_recovery_must_save_the_steps_in_memory(clusters, killed, failures):
    words, name = ("--workers=2", "--checkpoint-every=100000"), f"stopped-{killed}-{failures}"
    run = clusters.up(name, "--detach", *words, "--", *ENDLESS)
    wait_for(lambda: step_of(run) >= 40, "40 steps", SLOW_MACHINE_S)

    def kill() -> bool:
        return processes.kill(read_json(run.programs("worker-0"), {}).get(killed), signal.SIGKILL)

    for generation in range(failures):
        wait_for(lambda: run.generation >= generation and kill(), "a kill", SLOW_MACHINE_S)  # noqa: B023
    assert run.request_stop("a test")  # sooner than a command could
    clusters.check_bits(run, *words)
    assert 0 < max(event.step for event in run.events() if event.event == "restored") <= summary(run)["steps"]
