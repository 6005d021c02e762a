"""The images as they are built: what they hold, what they lack, and that they run with nothing but their own files."""

import functools
import json
import shlex
import subprocess
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.markers import Marker

from cluster.host.image import checkout, images, locks
from cluster.system.files import ROOT
from tests.e2e.scenario import TENSORBOARD_IMAGE as BOARD
from tests.e2e.scenario import TRAIN_IMAGE as TRAIN

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("images")]

HARDENED = (
    "--rm --read-only --tmpfs=/tmp --cap-drop=ALL --security-opt=no-new-privileges --network=none --user=12345:12345"
)


def docker(command: str, *words: str) -> str:
    done = subprocess.run(["docker", *shlex.split(command), *words], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, f"docker {command}: {done.stderr[-2000:]}"
    return done.stdout


def sh(image: str, script: str) -> str:
    return docker(f"run {HARDENED} --entrypoint=sh {image} -c", script)


def python(image: str, script: str) -> str:
    return docker(f"run {HARDENED} --entrypoint=python {image} -c", script)


@pytest.mark.parametrize("image", [TRAIN, BOARD])
def test_an_image_must_not_run_as_root_and_its_labels_must_report_what_is_inside(image):
    config = json.loads(docker(f"image inspect --format='{{{{json .Config}}}}' {image}"))
    assert "10001:10001" == config["User"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert {"title", "description", "base.name"} <= labels.keys()
    assert checkout.revision() == labels.get("revision", "")
    assert datetime.fromtimestamp(checkout.commit_time_s(), UTC).isoformat() == labels["created"]


@pytest.mark.parametrize("image", [TRAIN, BOARD])
def test_the_manifest_must_name_image_and_base(image):
    found = images.inspect_image(image)
    assert found["id"].startswith("sha256:")
    assert found["base_digest"].startswith("sha256:")
    assert images.inspect_image(found["id"])["base"] == found["base"] != ""


@pytest.mark.parametrize(("image", "target"), [(TRAIN, "train-cpu"), (BOARD, "tensorboard")])
def test_an_image_must_hold_what_is_locked_and_no_more(image, target):
    script = (
        "import importlib.metadata, re\n"
        "for each in importlib.metadata.distributions():\n"
        "    print(re.sub('[-_.]+', '-', each.name).lower(), each.version)\n"
    )
    installed = {tuple(line.split()) for line in python(image, script).splitlines()}
    expected = [pin for pin in locks.pins(target) if not pin.marker or Marker(pin.marker).evaluate()]
    assert {(pin.name, pin.version) for pin in expected} == installed


def test_all_that_tasks_use_must_import_from_compiled_files_with_legacy_keras_installed():
    script = (
        "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'\n"
        "import cluster.agent, json, keras, sys, tensorboard, tensorflow, tensorflow_datasets, tf_keras, tyro\n"
        "uncompiled = [name for name, module in sys.modules.items() if getattr(module, '__cached__', None)\n"
        "              and module.__file__.endswith('.py') and not os.path.exists(module.__cached__)]\n"
        "print(json.dumps([tensorflow.__version__, tensorflow.keras.Model is tf_keras.Model, uncompiled]))\n"
    )
    assert ["2.21.0", True, []] == json.loads(python(TRAIN, script))


def test_nothing_to_build_with_must_be_left():
    found = sh(TRAIN, "find /opt/venv \\( -name '*.h' -o -name pip -o -name tests -o -name libclang.so \\) | head")
    assert [] == found.split()


@pytest.mark.parametrize("image", [TRAIN, BOARD])
def test_certificates_must_be_the_bases(image):
    folders = ". /usr/local/share/ca-certificates /run/secrets"
    script = f"cd /etc/ssl/certs; sha256sum ca-certificates.crt; find {folders} 2>&1 || :"
    assert sh(images.inspect_image(image)["base"], script) == sh(image, script)


@functools.cache
def layers_of(image: str) -> list[dict[str, bool]]:
    """Return the paths of each layer of an image, in their order, and whether each is a folder."""
    (ROOT / ".build").mkdir(exist_ok=True)  # images are large: there is room for them
    with tempfile.TemporaryDirectory(dir=ROOT / ".build") as scratch:
        path = Path(scratch) / "image.tar"
        docker(f"image save --output={path} {image}")
        with tarfile.open(path) as archive:
            layers = []
            for name in json.load(archive.extractfile("manifest.json"))[0]["Layers"]:
                with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                    layers.append({f"/{each.name.removeprefix('./')}": each.isdir() for each in layer})
            return layers


def run(command: str) -> None:
    subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=True)


@pytest.mark.long
@pytest.mark.parametrize("image", [TRAIN, BOARD])
def test_only_the_layer_on_the_base_may_depend_on_the_order_of_its_files(image):
    """An engine packs a layer either folder by folder or sorted by path, see docs/internals/decisions/0011."""
    base = json.loads(
        docker(f"image inspect --format='{{{{json .RootFS.Layers}}}}' {images.inspect_image(image)['base']}")
    )
    built = layers_of(image)[len(base) :]
    assert "/opt/venv/bin/python" in built[0]
    for layer in built[1:]:
        assert sorted(layer) == sorted(layer, key=lambda path: path.split("/"))


@pytest.mark.long
def test_the_last_files_must_be_the_code():
    """So a change of the code alone rebuilds no other layer."""
    files = [{path for path, is_folder in layer.items() if not is_folder} for layer in layers_of(TRAIN)]
    (number,) = [number for number, paths in enumerate(files) if any(path.startswith("/app/") for path in paths)]
    assert [] == [path for paths in files[number:] for path in paths if not path.startswith("/app/")]


def test_an_image_must_hold_the_code_that_tasks_run_and_no_other():
    held = {Path(path) for path in sh(TRAIN, "cd /app; find . -type f").splitlines()}
    assert {"cluster", "train"} == {path.parts[0] for path in held}
    on_the_host = {path.name for path in (ROOT / "cluster").iterdir() if path.is_dir()}
    in_tasks = {path.parts[1] for path in held if path.parts[0] == "cluster" and len(path.parts) > 2}
    assert {"agent", "contract", "system"} <= in_tasks <= on_the_host | {"__pycache__"}
    assert "host" not in in_tasks
    assert {Path("train/__main__.py"), Path("cluster/contract/spec.py")} <= held


@pytest.mark.long
@pytest.mark.parametrize("image", images.IMAGES)
def test_building_from_nothing_must_give_the_same_bytes(image):
    """As the image in use, which the cache may have made."""
    verdict = images.reproduce_image(image, "cpu", images.image_name(image, "cpu"), run)
    assert verdict.identical, "\n".join(verdict.lines())
