"""The compressed size of the images, and the time to rebuild them after a change in `train/`."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import IO

from benchmarks.figures import Figure, Goal
from benchmarks.runs import Bench
from cluster.host.image import engine, images
from cluster.system.errors import RunFailed
from cluster.system.files import ROOT

CONTEXT = ("cluster", "train", "docker", "requirements", ".dockerignore")
CHANGED = "train/loops/steps.py"
TAG = "tf-cluster/bench"
LEVEL = 6
"""Compression level of an engine that pushes an image."""
GOALS_MB = {"train": ("CPU image, compressed", 450), "tensorboard": ("TensorBoard image, compressed", 250)}
_CHUNK = 2**20
_GZIP = b"\x1f\x8b"


def measure(bench: Bench) -> list[Figure]:
    """Build both images of a copy of the checkout under separate names, weigh them, and build them after changes.

    Raises:
        PrerequisiteError: no engine answers.
    """
    engine.demand("benchmark images")
    with tempfile.TemporaryDirectory(prefix="bench-images-") as folder:
        copy = Path(folder)
        tags: list[str] = []
        _copy(copy)
        try:
            tags += (first := _tags("first")).values()
            _build(bench, copy, first)
            figures = [] if bench.quick else [_weight(bench, image, first[image]) for image in images.IMAGES]
            seconds = []
            for turn in bench.turns():
                with (copy / CHANGED).open("a") as file:
                    file.write(f"# {time.time()}\n")  # another change than that of any earlier measurement
                tags += (changed := _tags(f"changed-{turn}")).values()
                seconds.append(_build(bench, copy, changed))
        finally:
            for tag in tags:
                engine.ask("image", "rm", tag, timeout_s=60)
    title = "second `image.build` after a change in `train/`"
    return [*figures, Figure("rebuild", title, "s", {"both images": seconds}, goal=Goal(5.0, at_least=False))]


def compressed_bytes(archive: Path) -> int:
    """Return the bytes of an image's layers when each is compressed, from an archive of `docker image save`."""
    with tarfile.open(archive) as opened:
        manifest = json.loads(_member(opened, "manifest.json").read())
        return sum(_compressed(_member(opened, name)) for name in manifest[0]["Layers"])


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    stream = archive.extractfile(name)
    assert stream is not None
    return stream


def _tags(name: str) -> dict[str, str]:
    return {image: f"{TAG}:{image}-{name}" for image in images.IMAGES}


def _copy(folder: Path) -> None:
    for name in CONTEXT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def _build(bench: Bench, folder: Path, tags: dict[str, str]) -> float:
    """Build both images as `image.build` does; return the seconds."""
    base = images.default_base()
    if base.missing:
        raise RunFailed(f"{base.name} is not there; run `invoke image.base`")
    commands = [images.build_command(image, "cpu", base, f"--tag={tag}") for image, tag in tags.items()]
    began = time.monotonic()
    for command in commands:
        bench.call(["bash", "-c", command], cwd=folder)
    return time.monotonic() - began


def _weight(bench: Bench, image: str, tag: str) -> Figure:
    title, goal_mb = GOALS_MB[image]
    bench.log(f"  weighing the {image} image")
    folder = ROOT / ".build"  # images are large: there is room for them
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "image.tar"
        bench.call(["docker", "image", "save", f"--output={path}", tag])
        size_mb = compressed_bytes(path) / 1e6
    return Figure(f"image-{image}", title, "MB", {title: [size_mb]}, goal=Goal(goal_mb, at_least=False))


def _compressed(layer: IO[bytes]) -> int:
    total, kept, packer = 0, b"", zlib.compressobj(LEVEL, wbits=31)
    while chunk := layer.read(_CHUNK):
        if not kept:
            kept = chunk[:2]
        total += len(chunk if kept == _GZIP else packer.compress(chunk))
    return total + (0 if kept == _GZIP else len(packer.flush()))
