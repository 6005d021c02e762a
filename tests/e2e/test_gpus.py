"""Training on this machine's GPUs, two of which some settings need; skipped where TensorFlow sees fewer."""

import shutil
import subprocess
import sys

import pytest

from cluster.system.json_files import read_json
from tests.e2e.scenario import step_of, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

COUNT = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
ONE = ("--loop=fit", "--precision=bf16", "--precision=fp16", "--micro-batches=2", "--strategy=mirrored --loop=fit")
TWO = ("", "--loop=fit", "--strategy=central", "--strategy=pipeline", "--strategy=pipeline --schedule=1f1b")


@pytest.fixture(scope="module")
def gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi")
    counted = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    return int(counted.stdout) or pytest.skip("TensorFlow sees no GPU: the environment needs train-gpu.lock")


def test_a_killed_run_must_end_with_the_bits_of_an_undisturbed_one(clusters, gpus):
    words = "--workers=0 --gpus=1 --checkpoint-every=100 -- --max-steps=1500"
    whole = clusters.up("whole", words)
    killed = clusters.up("killed", f"--detach {words}")
    wait_for(lambda: step_of(killed) >= 150, "step 150")
    clusters.invoke("chaos", "kill", "chief", "--run=killed")
    clusters.invoke("wait", "killed")
    assert 1 == killed.generation
    assert summary(whole)["weights_sha256"] == summary(killed)["weights_sha256"]
    assert read_json(whole.environment)["gpus"]


def test_a_gpu_must_compute_what_a_cpu_does(clusters, gpus):
    ours, theirs = (clusters.up(f"on-{name}", f"--workers=0 --gpus={name}").losses() for name in ("1", "none"))
    assert ours == pytest.approx(theirs, rel=5e-3)  # convolutions on GPUs compute in TF32


@pytest.mark.parametrize("words", [f"--gpus=1 {each}" for each in ONE] + [f"--gpus=2 {each}" for each in TWO])
def test_a_repeated_run_must_give_the_same_bits(clusters, gpus, words):
    if int(words[7]) > gpus:
        pytest.skip(f"needs {words[7]} GPUs")
    name = words.replace(" ", "").replace("=", "-").strip("-").replace("--", "-")
    runs = [clusters.up(f"{name}-{time}", f"--workers=0 {words}") for time in ("first", "again")]
    first, again = (summary(run)["weights_sha256"] for run in runs)
    assert first == again
