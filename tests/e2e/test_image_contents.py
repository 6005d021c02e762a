"""The images as they are built: what they hold, what they lack, and that they run with nothing but their own files."""

import functools
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from cluster.host.image import checkout, contents, images, locks, reproduction, sbom
from cluster.system.paths import ROOT
from tests.e2e.scenario import TENSORBOARD_IMAGE as BOARD
from tests.e2e.scenario import TRAIN_IMAGE as TRAIN

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("images")]

LOCKED = [(TRAIN, "train-cpu"), (BOARD, "tensorboard")]
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
def test_an_image_must_not_run_as_root(image):
    assert "10001:10001" == json.loads(docker(f"image inspect --format='{{{{json .Config.User}}}}' {image}"))


def test_a_task_must_start_the_agent_and_stop_on_sigterm():
    config = json.loads(docker(f"image inspect --format='{{{{json .Config}}}}' {TRAIN}"))
    assert ["python", "-m", "cluster.agent"] == config["Entrypoint"]
    assert "SIGTERM" == config["StopSignal"]


@pytest.mark.parametrize("image", [TRAIN, BOARD])
def test_labels_must_report_what_is_inside(image):
    config = json.loads(docker(f"image inspect --format='{{{{json .Config}}}}' {image}"))
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert {"title", "description", "base.name"} <= labels.keys()
    assert checkout.revision() == labels.get("revision", "")
    assert datetime.fromtimestamp(checkout.commit_time_s(), UTC).isoformat() == labels["created"]


@pytest.mark.parametrize("image", [TRAIN, BOARD])
def test_the_manifest_must_name_image_and_base(image):
    found = images.inspect(image)
    assert found["id"].startswith("sha256:")
    assert found["base_digest"].startswith("sha256:")
    assert images.inspect(found["id"])["base"] == found["base"] != ""


@pytest.mark.parametrize(("image", "target"), LOCKED)
def test_an_image_must_hold_what_is_locked_and_no_more(image, target):
    script = (
        "import importlib.metadata, re\n"
        "for each in importlib.metadata.distributions():\n"
        "    print(re.sub('[-_.]+', '-', each.name).lower(), each.version)\n"
    )
    installed = {tuple(line.split()) for line in python(image, script).splitlines()}
    expected = [pin for pin in locks.pins(target) if not pin.marker or Marker(pin.marker).evaluate()]
    assert {(pin.name, pin.version) for pin in expected} == installed


def test_all_that_tasks_use_must_import_from_compiled_files_with_legacy_keras_beside_it():
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
    assert sh(images.inspect(image)["base"], script) == sh(image, script)


@pytest.fixture(scope="module")
def archive_of() -> Iterator[Callable[[str], Path]]:
    """Saves an image once: they are large. Where `contents.py` has its own: there is room for them."""
    with ExitStack() as saved:
        yield functools.cache(lambda image: saved.enter_context(contents.archive(image, run)))


@pytest.fixture(scope="module")
def held(archive_of) -> Callable[[str], contents.Image]:
    """Reads every file of an image once."""
    return functools.cache(lambda image: contents.read(archive_of(image)))


def run(command: str) -> None:
    subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize("image", [pytest.param(TRAIN, marks=pytest.mark.long), BOARD])
def test_only_the_layer_on_the_base_may_depend_on_the_order_of_its_files(image, held):
    """An engine packs a layer either folder by folder or sorted by path, see docs/internals/decisions/0011."""
    base = json.loads(docker(f"image inspect --format='{{{{json .RootFS.Layers}}}}' {images.inspect(image)['base']}"))
    built = held(image).layers[len(base) :]
    assert "/opt/venv/bin/python" in built[0].entries
    for layer in built[1:]:
        assert sorted(layer.entries) == sorted(layer.entries, key=lambda path: path.split("/"))


@pytest.mark.long
def test_the_last_files_must_be_the_code(held):
    """So a change of the code alone rebuilds no other layer."""
    files = [{path for path, entry in layer.entries.items() if entry.type != "folder"} for layer in held(TRAIN).layers]
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


@pytest.mark.parametrize("image", [pytest.param("train", marks=pytest.mark.long), "tensorboard"])
def test_every_package_must_be_listed_with_its_hash(image, archive_of, held, tmp_path, monkeypatch):
    name = images.name(image, "cpu")
    monkeypatch.setattr(contents, "read", lambda path: held(name))  # of the same archive, in which it takes long

    def run_but_save(command: str) -> None:
        *words, output, saved = shlex.split(command)
        if words == ["docker", "image", "save"]:
            Path(output.removeprefix("--output=")).symlink_to(archive_of(saved))
        else:
            run(command)

    sbom.write(tmp_path / "one", image, "cpu", run_but_save)
    if image == "train":
        sbom.write(tmp_path / "two", image, "cpu", run_but_save)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    listed = json.loads((tmp_path / "one").read_text())
    assert ("CycloneDX", "1.6") == (listed["bomFormat"], listed["specVersion"])
    assert images.inspect(name)["id"] == listed["metadata"]["component"]["version"]
    packages = [each for each in listed["components"] if each["type"] == "library"]
    assert len(packages) == len({each["bom-ref"] for each in packages})
    assert [] == [each["purl"] for each in packages if not re.fullmatch("[0-9a-f]{64}", each["hashes"][0]["content"])]

    def of(kind: str) -> set[tuple[str, str]]:
        return {(each["name"], each["version"]) for each in packages if each["purl"].startswith(f"pkg:{kind}/")}

    debian = sh(name, "dpkg-query --show --showformat='${Package} ${Version}\\n'")
    assert {tuple(line.split()) for line in debian.splitlines()} == of("deb")
    locked = locks.pins({"train": "train-cpu"}.get(image, image))
    expected = {(pin.name, pin.version) for pin in locked if not pin.marker or Marker(pin.marker).evaluate()}
    assert expected <= {(canonicalize_name(package), version) for package, version in of("pypi")}


@pytest.mark.long
@pytest.mark.parametrize("image", images.IMAGES)
def test_building_from_nothing_must_give_the_same_bytes(image):
    """As the image in use, which the cache may have made; file by file, so that a failure names what differs."""
    verdict = reproduction.examine(image, "cpu", images.name(image, "cpu"), run)
    assert verdict.identical, "\n".join(verdict.lines())
