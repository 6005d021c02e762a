"""What a run gave and saved: golden losses; exported, served, trained further."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from cluster.system.ports import free_ports
from tests.e2e.scenario import DATA
from tests.golden import losses as golden
from tests.support.waiting import wait_for

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


def save_images(run: RunFolder) -> Path:
    images = np.fromfile(DATA / "arrays" / "fashion_mnist-3.0.1" / "test_features.bin", np.uint8)[: 32 * 784]
    np.save(run.path / "images.npy", images.reshape(32, 28, 28, 1).astype(np.float32))
    return run.path / "images.npy"


def evaluate(program: str, *arguments: Path) -> list:
    """Return the JSON that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def version(clusters, alone, tmp_path_factory) -> Path:
    """A version of a served model: of the one at SERVING_URL if there is one, which serves MODEL_DIR."""
    folder = Path(os.environ["MODEL_DIR"] if "SERVING_URL" in os.environ else tmp_path_factory.mktemp("models"))
    before = (alone.export / "saved_model.pb").stat().st_mtime_ns
    *exported, added = clusters.invoke("export", alone.name, f"--serving={folder}").splitlines()
    assert "step 20" in exported[-1]
    assert (alone.export / "saved_model.pb").stat().st_mtime_ns > before
    return folder / added.split()[1]


def test_a_served_version_must_give_what_the_model_gives_also_inside_of_a_strategy(alone, version):
    assert 32 == len(evaluate(SERVE, version, alone.path, DATA, save_images(alone)))


@pytest.fixture
def server(version) -> Iterator[str]:
    """The address of a model that TensorFlow Serving serves."""
    if url := os.environ.get("SERVING_URL"):
        yield url
        return
    if (program := shutil.which("tensorflow_model_server")) is None:
        pytest.skip("SERVING_URL names no server, and tensorflow_model_server is not installed")
    rest, grpc = free_ports(2)
    options = (f"--rest_api_port={rest}", f"--port={grpc}", "--model_name=model", f"--model_base_path={version.parent}")
    process = subprocess.Popen([program, *options])
    yield f"http://127.0.0.1:{rest}/v1/models/model"
    process.kill()
    process.wait()


def test_a_server_must_answer_as_the_model(alone, version, server):
    wait_for(lambda: is_served(server, version), "the server to load the version", 60)
    expected = evaluate(SERVE, version, alone.path, DATA, save_images(alone))
    body = json.dumps({"instances": np.load(alone.path / "images.npy").tolist()}).encode()
    with urllib.request.urlopen(f"{server}:predict", body) as answer:
        np.testing.assert_allclose(json.load(answer)["predictions"], expected, rtol=1e-4, atol=1e-5)


def is_served(url: str, version: Path) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            states = json.load(answer)["model_version_status"]
    except OSError:
        return False
    return any(state["version"] == version.name and state["state"] == "AVAILABLE" for state in states)


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
