"""A model that no single task can hold trains on four stages, to the weights of one task with enough memory.

What processes may allocate is limited by `RLIMIT_DATA`, which includes the stacks of their threads. So these are small,
and all of it runs on two cores, which the number of threads follows from.
"""

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.scenario import Clusters, summary

pytestmark = pytest.mark.long

LIMIT_MIB, STACK_MIB = 1700, 2
TEXT = """
import numpy as np


def short():
    text = np.frombuffer(bytes(range(97, 123)) * 2, np.uint8)
    windows = [text[at : at + 5 * 8].reshape(5, 8) for at in (0, 1)]
    features, labels = windows[0], windows[1].astype(np.int64)
    return {"train": (features[:4], labels[:4]), "test": (features[4:], labels[4:]), "classes": [*map(str, range(256))]}
"""
"""A text that is evaluated in a second."""
SIZE = ("--transformer.layers=8", "--transformer.width=1024", "--global-batch=4")


@pytest.fixture(scope="module")
def large(clusters, tmp_path_factory) -> Clusters:
    """Clusters for a model of 100 million weights, which takes 2.4 GB to train."""
    return clusters.with_modules(tmp_path_factory.mktemp("short"), own_data=True, short_text=TEXT)


@pytest.fixture(scope="module")
def limited(large) -> Clusters:
    """The same where no process may allocate more than the limit."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    limits = ("prlimit", f"--data={LIMIT_MIB * 2**20}", f"--stack={STACK_MIB * 2**20}")
    limits = ("taskset", "--cpu-list", cores, *limits)
    return replace(large, limits=limits)


def train(clusters: Clusters, name: str, *options: str, expect: int = 0) -> dict[str, Any]:
    words = ("--preset=transformer_lm", "--micro-batches=2", "--max-restarts=0", *options)
    training = ("--dataset=short_text:short", *SIZE, "--max-steps=1", "--steps-per-loop=1", "--threads=1")
    return summary(clusters.up(name, *words, training=training, expect=expect, timeout_s=500))


@pytest.fixture(scope="module")
def enough(large) -> dict[str, Any]:
    return train(large, "enough", "--workers=0")


def test_one_task_must_say_in_one_line_that_its_memory_is_too_small(limited):
    assert train(limited, "too-large", "--workers=0", expect=1)["cause"]["error"].startswith("out of memory")


def test_more_stages_must_hold_it(limited, enough):
    found = train(limited, "stages", "--strategy=pipeline", "--stages=4", "--schedule=1f1b")
    assert enough["weights_sha256"] == found["weights_sha256"]
    assert (limited.run("stages").export / "saved_model.pb").exists()
