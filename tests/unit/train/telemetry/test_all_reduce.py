"""The measured all-reduce, on logical CPUs, in separate processes because TensorFlow configures devices only once."""

import json
import os
import subprocess
import sys

import pytest

from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE
from tests import fast
from train.bandwidth import bus_bandwidth


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `train.bandwidth` where no GPU is seen."""
    fast.leave_out("starts TensorFlow")
    given = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | environment
    command = [sys.executable, "-m", "train.bandwidth", *words]
    return subprocess.run(command, capture_output=True, text=True, env=given, check=False)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.long), 3])
def test_an_all_reduce_must_be_measured_on_every_device(devices):
    done = program("--devices", str(devices), "--mib", "1", "2")
    assert 0 == done.returncode, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert [f"CPU:{index}" for index in range(devices)] == measured["devices"]
    assert [1, 2] == [size["mib"] for size in measured["sizes"]]
    for size in measured["sizes"]:
        assert size["seconds"] > 0
        assert size["bus_gb_s"] == bus_bandwidth(size["mib"] * 2**20, size["seconds"], devices)


def test_one_device_must_be_refused():
    done = program("--devices", "1")
    assert (EXIT_USAGE, "error: --devices 1: expected 2 or more\n") == (
        done.returncode,
        done.stderr,
    )


def test_gpus_that_were_given_and_are_not_seen_must_end_it():
    done = program("--devices", "2", "--mib", "1", GPUS_GIVEN="2")
    assert EXIT_PREREQUISITE == done.returncode
    assert done.stderr.splitlines()[-1].startswith("error: TensorFlow sees 0 of 2 GPUs")
