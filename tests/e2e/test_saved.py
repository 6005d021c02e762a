"""What a run gave and saved: golden losses; exported, served, trained further."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from tests.e2e.scenario import DATA
from tests.golden import losses as golden

pytestmark = pytest.mark.usefixtures("data")

RELATIVE = 2e-4
"""What another kind of processor may change in 20 steps: its kernels add up in another order."""

LOAD_IN_SCOPE = """
import sys
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
images = tf.constant(np.load(sys.argv[2]))
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    scoped = tf.saved_model.load(sys.argv[1])
plain = tf.saved_model.load(sys.argv[1])
np.testing.assert_allclose(scoped.serve(images), plain.serve(images), rtol=1e-6)
print(plain.serve(images).numpy().argmax(-1).tolist())
"""


@pytest.fixture(scope="module")
def alone(clusters) -> RunFolder:
    """The chief alone, undisturbed."""
    return golden.train(clusters, "fashion_mnist")


def test_the_first_losses_must_be_the_golden_ones(alone):
    """Bit for bit on the processor and the packages that they were recorded with, otherwise nearly."""
    expected, found = read_json(golden.path_of("fashion_mnist")), golden.describe(alone)
    assert golden.THREADS == found["threads"]
    if all(expected[name] == found[name] for name in ("cpu", "packages")):
        assert expected == found
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=RELATIVE)


def test_an_export_must_serve_with_and_without_a_strategy(clusters, alone):
    before = (alone.export / "saved_model.pb").stat().st_mtime_ns
    assert "step 20" in clusters.invoke("export", alone.name)
    assert (alone.export / "saved_model.pb").stat().st_mtime_ns > before
    images = np.fromfile(DATA / "arrays" / "fashion_mnist-3.0.1" / "test_features.bin", np.uint8)[: 32 * 784]
    np.save(alone.path / "images.npy", images.reshape(32, 28, 28, 1).astype(np.float32))
    done = subprocess.run(
        [sys.executable, "-c", LOAD_IN_SCOPE, str(alone.export), str(alone.path / "images.npy")],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    assert 32 == len(json.loads(done.stdout))


def test_predict_must_name_the_likeliest_classes(clusters, alone):
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(alone.path / "image.png")
    lines = clusters.invoke("predict", alone.name, f"--image={alone.path / 'image.png'}").splitlines()
    assert 3 == len(lines)
    assert all("%" in line for line in lines)
    names = json.loads((alone.export / "assets.extra" / "classes.json").read_text())
    assert {line.split("%")[1].strip() for line in lines} <= set(names)
    output = clusters.invoke("predict", alone.name, f"--image={alone.summary}", expect=2)
    assert "expected a PNG or JPEG file" in output


@pytest.mark.long  # files of all kinds: `test_initial_weights.py`; a run's: `test_payload.py`
def test_a_run_must_begin_with_the_weights_of_another(clusters, alone):
    tuned = clusters.up("tuned", f"--workers=0 --init-from={alone.name} -- --max-steps 5 --freeze conv2d*")
    assert "began with 8 of the 8 weights from ckpt-20.index" in tuned.log("chief").read_text()
    assert tuned.losses()[1] < alone.losses()[1]
