"""A run from a checkout whose folder is called anything: the shell, Compose and pip take the name as it is."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.host.image import engine
from cluster.system.json_files import read_json
from tests.e2e.scenario import DATA, ROOT, Clusters

pytestmark = pytest.mark.long  # `test_folder_names.py` calls commands and `make` in such a folder each time

NAME = 'a;touch PWNED; $(touch PWNED) `touch PWNED` bob\'s "R&D" (1) ${x} ü'
OPTIONS = ("--name=one", "--workers=0", "--tensorboard-port=0")
TRAINING = ("--max-steps", "4", "--log-every", "1", "--evaluate-every", "1000")
OWN_IMAGES = "tf-cluster-tests-paths"


@pytest.fixture
def checkout(tmp_path, data, copy_checkout) -> Path:
    """A copy of the checkout, with its data."""
    folder = tmp_path / NAME
    copy_checkout(folder)
    shutil.copytree(DATA / "arrays", folder / "data" / "arrays")
    return folder


@pytest.fixture
def own_images() -> Iterator[str]:
    """The beginning of the names of images that are removed again."""
    yield OWN_IMAGES
    for name in ("train:cpu", "tensorboard:latest"):
        engine.ask("image", "rm", f"{OWN_IMAGES}/{name}", timeout_s=60)


@pytest.mark.docker
@pytest.mark.usefixtures("images")
def test_a_run_in_containers_must_succeed_under_any_umask(checkout, own_images):
    for path in [checkout, *checkout.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = os.umask(0o077)
    try:
        own = {"RUNS_DIR": f"{checkout}/runs", "DATA_DIR": f"{checkout}/data", "IMAGE_NAMESPACE": own_images}
        clusters = Clusters(checkout / "runs", own, checkout)
        clusters.invoke("up", *OPTIONS, "--runtime=docker", "--", *TRAINING, timeout_s=900)
    finally:
        os.umask(before)
    assert "succeeded" == read_json(checkout / "runs" / "one" / "summary.json")["state"]
    assert [] == [*checkout.parent.rglob("PWNED"), *ROOT.glob("PWNED*")]
    _, text = engine.ask("image", "inspect", "--format={{json .RootFS.Layers}}", f"{own_images}/train:cpu")
    assert text == engine.ask("image", "inspect", "--format={{json .RootFS.Layers}}", "tf-cluster-tests/train:cpu")[1]
    clusters.invoke("down")
