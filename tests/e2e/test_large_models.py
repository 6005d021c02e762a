"""A model that a task cannot hold ends the run with one line that says so.

What processes may allocate is limited by `RLIMIT_DATA`, which includes the stacks of their threads. So these are small,
and all of it runs on two cores, which the number of threads follows from.
"""

from __future__ import annotations

import os

import pytest

from tests.e2e.scenario import Clusters, summary

pytestmark = pytest.mark.long

LIMIT_MIB, STACK_MIB = 1400, 2
TEXT = """
import numpy as np


def short():
    text = np.frombuffer(bytes(range(97, 123)) * 200, np.uint8)
    windows = [text[at : at + 5 * 1024].reshape(5, 1024) for at in (0, 1)]
    features, labels = windows[0], windows[1].astype(np.int64)
    return {"train": (features[:4], labels[:4]), "test": (features[4:], labels[4:]), "classes": [*map(str, range(256))]}
"""
"""A text that is evaluated in a second."""
SIZE = ("--transformer.layers=4", "--transformer.width=1024", "--transformer.context=8", "--global-batch=4")


@pytest.fixture(scope="module")
def large(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Clusters:
    """Clusters for a model of 50 million weights, which takes 1.6 GB to train."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "short_text.py").write_text(TEXT)
    data = tmp_path_factory.mktemp("data")
    return Clusters(clusters.runs_dir, {"PYTHONPATH": str(folder), "DATA_DIR": str(data)})


@pytest.fixture(scope="module")
def limited(large: Clusters) -> Clusters:
    """The same where no process may allocate more than the limit."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    limits = ("prlimit", f"--data={LIMIT_MIB * 2**20}", f"--stack={STACK_MIB * 2**20}")
    limits = ("taskset", "--cpu-list", cores, *limits)
    return Clusters(large.runs_dir, large.environment, limits=limits)


def train(clusters: Clusters, name: str, *options: str, expect: int = 0) -> None:
    up = ("up", f"--name={name}", "--runtime=local", "--tensorboard-port=0", "--preset=transformer_lm")
    training = ("--dataset=short_text:short", *SIZE, "--max-steps=3", "--steps-per-loop=1", "--threads=1")
    up = (*up, "--micro-batches=2", "--max-restarts=0", *options)
    clusters.invoke(*up, "--", *training, expect=expect, timeout_s=500)


def test_one_task_must_say_in_one_line_that_its_memory_is_too_small(limited: Clusters) -> None:
    train(limited, "too-large", "--workers=0", expect=1)
    assert summary(limited.run("too-large"))["cause"]["error"].startswith("out of memory")
