"""The benchmark of images: their weight, and what is built for it."""

import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from benchmarks import images as weighing
from benchmarks.runs import Bench
from cluster.host.image import engine, images
from cluster.system.errors import (
    RunFailed,
)
from cluster.system.paths import ROOT


def test_an_image_s_weight_must_be_that_of_its_layers_compressed(tmp_path):
    layers = {"plain/layer.tar": b"a" * 5_000_000, "blobs/packed": gzip.compress(b"b" * 1000)}
    parts = {"manifest.json": json.dumps([{"Config": "c", "Layers": list(layers)}]).encode(), **layers}
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        for name, content in parts.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    packed = len(gzip.compress(layers["plain/layer.tar"], 6)) + len(layers["blobs/packed"])
    assert pytest.approx(packed, abs=20) == weighing.compressed_bytes(tmp_path / "image.tar")


@pytest.mark.parametrize("fails", [False, True])
def test_images_must_be_built_under_names_of_their_own_that_go_again(monkeypatch, fails):
    there: set[str] = set()
    contexts: list[str] = []

    def call(self: Bench, words: list[str], environment: object = None, cwd: Path = Path()) -> str:
        assert (cwd / ".dockerignore").is_file()
        contexts.append((cwd / weighing.CHANGED).read_text())
        (tag,) = re.findall(r"--tag=(\S+)", words[-1])
        assert tag.startswith("tf-cluster/bench:")
        there.add(tag)
        if fails and len(contexts) == 3:
            raise RunFailed("the build broke")
        return ""

    def ask(*words: str, timeout_s: float = 0) -> tuple[int, str]:
        assert words[:2] == ("image", "rm")
        there.discard(words[2])
        return 0, ""

    monkeypatch.setattr(Bench, "call", call)
    monkeypatch.setattr(engine, "demand", lambda what: None)
    monkeypatch.setattr(engine, "ask", ask)
    monkeypatch.setattr(images, "default_base", lambda: images.Base("some-base"))
    bench = Bench(Path(), rounds=2, quick=True, log=lambda line: None)
    if fails:
        with pytest.raises(RunFailed, match="the build broke"):
            weighing.measure(bench)
    else:
        (figure,) = weighing.measure(bench)
        assert ("rebuild", 1) == (figure.name, len(figure.variants["both images"]))
        assert 4 == len(contexts)
    first, changed = contexts[0], contexts[2]
    assert first == contexts[1] == (ROOT / weighing.CHANGED).read_text()
    assert changed.startswith(first)
    assert changed != first
    assert set() == there
