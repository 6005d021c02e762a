"""The contents of an image: every file of every layer, read from an archive that `docker image save` wrote.

The archive is read by Python's own tarfile, so that a comparison trusts neither the engine nor the digests it claims.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cluster.system.errors import UsageError
from cluster.system.paths import ROOT

Shell = Callable[[str], object]
"""Runs a command."""

_DIGITS = 12
"""Digits of a sha256 that messages show: enough to distinguish two."""

_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "pipe",
}


@dataclass(frozen=True)
class Entry:
    """One path in a layer, with everything that a layer records about it."""

    type: str
    mode: str
    owner: str
    mtime: float
    link: str
    """Where a link leads."""
    device: str
    attributes: str
    """Extended ones, such as capabilities."""
    content: str
    """The sha256 of a file's bytes."""


@dataclass(frozen=True)
class Layer:
    """One layer: its digest as the image's configuration claims it, and its entries in their order."""

    digest: str
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Image:
    """A whole image."""

    id: str
    """The digest of its configuration, which holds the layers' digests."""
    config: dict[str, Any]
    layers: tuple[Layer, ...]

    @property
    def num_files(self) -> int:
        """How many entries are not folders."""
        return sum(entry.type != "folder" for layer in self.layers for entry in layer.entries.values())


@dataclass(frozen=True)
class Difference:
    """One thing in which two images differ."""

    where: str
    """`configuration` or `layer 3`."""
    what: str
    """The path or the setting; empty where it is the layer as a whole."""
    how: str

    def __str__(self) -> str:
        return f"{self.where}  {self.what}: {self.how}" if self.what else f"{self.where}: {self.how}"


@contextmanager
def archive(image: str, sh: Shell) -> Iterator[Path]:
    """Save an image of this engine to a temporary archive."""
    folder = ROOT / ".build"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="image-", dir=folder) as scratch:
        path = Path(scratch) / "image.tar"
        sh(shlex.join(["docker", "image", "save", f"--output={path}", image]))
        yield path


def saved(image: str, sh: Shell) -> Image:
    """Return the contents of an image of this engine."""
    with archive(image, sh) as path:
        return read(path)


def read(path: Path) -> Image:
    """Return the contents of an archive of one image."""
    try:
        with tarfile.open(path) as archive:
            manifest = json.load(member(archive, "manifest.json"))
            if len(manifest) != 1:
                raise UsageError(f"{path} holds {len(manifest)} images, expected one; save it alone")
            text = member(archive, manifest[0]["Config"]).read()
            config = json.loads(text)
            claimed = config["rootfs"]["diff_ids"]
            layers = [
                Layer(digest, dict(_entries(member(archive, name))))
                for digest, name in zip(claimed, manifest[0]["Layers"], strict=True)
            ]
    except (tarfile.TarError, KeyError, TypeError, ValueError, EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{path} is not an image as `docker image save` writes it ({error})") from error
    return Image(f"sha256:{hashlib.sha256(text).hexdigest()}", config, tuple(layers))


def member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """Open a file of an archive."""
    stream = archive.extractfile(name)
    if stream is None:
        raise ValueError(f"{name} is not a file")
    return stream


def _entries(stream: IO[bytes]) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a layer, packed or not, in one pass."""
    with tarfile.open(fileobj=stream, mode="r|*") as layer:
        for found in layer:
            content = ""
            if found.isreg():
                data = layer.extractfile(found)
                assert isinstance(data, tarfile.ExFileObject)
                content = hashlib.file_digest(data, "sha256").hexdigest()
            extended = {name: text for name, text in found.pax_headers.items() if "xattr" in name}
            yield (
                "/" + found.name.removeprefix("./").strip("/"),
                Entry(
                    type=_KINDS.get(found.type, f"type {found.type!r}"),
                    mode=f"{found.mode:04o}",
                    owner=f"{found.uid}:{found.gid}",
                    mtime=found.mtime,
                    link=found.linkname,
                    device=f"{found.devmajor}:{found.devminor}" if found.isdev() and not found.isfifo() else "",
                    attributes=json.dumps(extended, sort_keys=True) if extended else "",
                    content=content,
                ),
            )


def compare(first: Image, second: Image, names: tuple[str, str]) -> list[Difference]:
    """Return every difference, the configuration first and the history's dates, which follow from others, last."""
    settings: list[Difference] = []
    history: list[Difference] = []
    ours, theirs = (dict(_flat({**each.config, "rootfs": None})) for each in (first, second))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            how = f"{json.dumps(ours.get(key))} and {json.dumps(theirs.get(key))}"
            (history if key.startswith("history.") else settings).append(Difference("configuration", key, how))
    found = [*settings, *_compare_layers(first.layers, second.layers, names), *history]
    if not found and first.id != second.id:
        found.append(Difference("configuration", "", f"the same, written differently: {first.id} and {second.id}"))
    return found


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a JSON value by their dotted keys."""
    if not isinstance(value, dict | list) or not value:
        yield key, value
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(each, f"{key}.{name}" if key else str(name))


def _compare_layers(
    first: tuple[Layer, ...], second: tuple[Layer, ...], names: tuple[str, str]
) -> Iterator[Difference]:
    ours, theirs = ([layer.digest for layer in layers] for layers in (first, second))
    if ours != theirs and sorted(ours) == sorted(theirs):
        order = ", ".join(str(theirs.index(digest) + 1) for digest in ours)
        yield Difference("layers", "", f"the same in another order: those of {names[0]} are {order} of {names[1]}")
        return
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        yield from _compare_entries(f"layer {number}", one, other, names)
    shared = min(len(first), len(second))
    for name, more in zip(names, (first[shared:], second[shared:]), strict=True):
        for number, layer in enumerate(more, shared + 1):
            yield Difference(f"layer {number}", "", f"only in {name}, {len(layer.entries)} entries")


def _compare_entries(where: str, first: Layer, second: Layer, names: tuple[str, str]) -> Iterator[Difference]:
    found = False
    for path in sorted(first.entries.keys() | second.entries.keys()):
        ours, theirs = first.entries.get(path), second.entries.get(path)
        if ours != theirs:
            found = True
            yield Difference(where, path, _how(ours, theirs, names))
    if not found and list(first.entries) != list(second.entries):
        yield Difference(where, "", "the same files in another order")
    elif not found and first.digest != second.digest:
        yield Difference(where, "", f"the same files, packed differently: {first.digest} and {second.digest}")


def _how(first: Entry | None, second: Entry | None, names: tuple[str, str]) -> str:
    """Return how two entries of the same path differ."""
    if first is None or second is None:
        return f"only in {names[0] if second is None else names[1]}"
    differences = []
    for field in Entry.__dataclass_fields__:
        pair = [getattr(entry, field) for entry in (first, second)]
        if pair[0] != pair[1]:
            ours, theirs = (str(value)[:_DIGITS] if field == "content" else value for value in pair)
            differences.append(f"{field} {_shown(ours)} and {_shown(theirs)}")
    return ", ".join(differences)


def _shown(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value) or "none"
