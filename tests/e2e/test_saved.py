"""What a run gave and saved: golden losses; exported, served, trained further."""

import json
import os
import subprocess
import sys
from pathlib import Path

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

SERVE = """
import json
import sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from cluster.contract.run.folder import RunFolder
from train import saved_model
_, version, run_dir, data_dir, images = sys.argv
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
images = tf.constant(np.load(images))
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    scoped = tf.saved_model.load(version)
plain = tf.saved_model.load(version)
(served,) = plain.signatures["serving_default"](images).values()
_, _, model, _ = saved_model._restore(RunFolder(Path(run_dir)), Path(data_dir))
for found in (served, plain.serve(images), scoped.serve(images)):
    np.testing.assert_allclose(found, model(images, training=False), rtol=1e-5, atol=1e-6)
print(json.dumps(served.numpy().tolist()))
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


@pytest.fixture(scope="module")
def version(clusters, alone, tmp_path_factory) -> Path:
    """A version of a model in the layout of TensorFlow Serving."""
    folder = tmp_path_factory.mktemp("models")
    before = (alone.export / "saved_model.pb").stat().st_mtime_ns
    *exported, added = clusters.invoke("export", alone.name, f"--serving={folder}").splitlines()
    assert "step 20" in exported[-1]
    assert (alone.export / "saved_model.pb").stat().st_mtime_ns > before
    return folder / added.split()[1]


def test_a_served_version_must_give_what_the_model_gives_also_inside_of_a_strategy(alone, version):
    images = np.fromfile(DATA / "arrays" / "fashion_mnist-3.0.1" / "test_features.bin", np.uint8)[: 32 * 784]
    np.save(alone.path / "images.npy", images.reshape(32, 28, 28, 1).astype(np.float32))
    command = [sys.executable, "-c", SERVE, version, alone.path, DATA, alone.path / "images.npy"]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stderr
    assert 32 == len(json.loads(done.stdout))


@pytest.mark.extended
def test_predict_must_name_the_likeliest_classes(clusters, alone):
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(alone.path / "image.png")
    lines = clusters.invoke("predict", alone.name, f"--image={alone.path / 'image.png'}").splitlines()
    assert 3 == len(lines)
    assert all("%" in line for line in lines)
    names = json.loads((alone.export / "assets.extra" / "classes.json").read_text())
    assert {line.split("%")[1].strip() for line in lines} <= set(names)
    output = clusters.invoke("predict", alone.name, f"--image={alone.summary}", expect=2)
    assert "expected a PNG or JPEG file" in output
