"""Data from Debian's packages: for machines that reach a Debian mirror and little else.

`dataset-fashion-mnist` holds the original four files, but was built with new gzip headers (no name, another time), so
their sha256 is not the one that TFDS records. With the original headers back, they are the original files, bit for bit.
`dict-jargon` holds the text of the Jargon File, which is in the public domain, compressed. `python3-sklearn` holds the
small table of breast cancers among its example data; of the package no more than that is used.
apt-get runs with its own lists and cache: it needs no root, no lists from before, and changes nothing on the machine.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.system.errors import PrerequisiteError
from train.data.prepare.download import SourceFile

PACKAGES = {
    "fashion_mnist": "dataset-fashion-mnist",
    "jargon_file": "dict-jargon",
    "breast_cancer": "python3-sklearn",
}
COMMAND_TIMEOUT_S = 180.0

_MTIMES = {"train": 1504176606, "t10k": 1504176627}
"""When Zalando compressed the files, by the first word of their names; seconds since 1970."""

# The flags of a gzip member, RFC 1952, section 2.3.1.
_FHCRC, _FEXTRA, _FNAME, _FCOMMENT = 2, 4, 8, 16


def fetch(dataset: str, files: Sequence[SourceFile], folder: Path, say: Callable[[str], None]) -> None:
    """Put `files`, as they originally were, into `folder`, out of Debian's package for `dataset`.

    Raises:
        PrerequisiteError: Debian has no such package, this is no Debian, or its mirror cannot be reached.
    """
    if dataset not in PACKAGES:
        raise PrerequisiteError(f"Debian has no package of {dataset}")
    missing = [command for command in ("apt-get", "dpkg-deb") if shutil.which(command) is None]
    if missing:
        raise PrerequisiteError(f"no {' and no '.join(missing)} on this machine")
    package = PACKAGES[dataset]
    scratch = folder.resolve() / "apt"  # apt would look for a relative path below its own folders
    for name in ("lists/partial", "cache/archives/partial", "unpacked"):
        (scratch / name).mkdir(parents=True)
    say(f"fetching Debian's package lists and {package}")
    # An unreachable repository of somebody else's fails the update, but not the download: that one decides.
    update = _run([*_apt_get(scratch), "update"], scratch)
    download = _run([*_apt_get(scratch), "download", package], scratch)
    if download.returncode != 0:
        raise PrerequisiteError(f"{package}: {_first_error(download.stdout, update.stdout)}")
    archive = next(scratch.glob(f"{package}_*.deb"))
    unpack = _run(["dpkg-deb", "-x", str(archive), "unpacked"], scratch)
    if unpack.returncode != 0:
        raise PrerequisiteError(f"{archive.name}: {_first_error(unpack.stdout)}")
    found = {path.name: path for path in (scratch / "unpacked").rglob("*") if path.is_file()}
    for file in files:
        packed = f"{file.name}.dz" if f"{file.name}.dz" in found else file.name
        if packed not in found:
            raise PrerequisiteError(f"{archive.name} holds no {packed}")
        content = found[packed].read_bytes()
        (folder / file.name).write_bytes(content if packed.endswith(".csv") else _original(file.name, content))
    shutil.rmtree(scratch)


def _original(name: str, content: bytes) -> bytes:
    """Return a file as it originally was: with its own gzip header, or not compressed."""
    if name.endswith(".gz"):
        return with_header(content, name.removesuffix(".gz"), _MTIMES[name.partition("-")[0]])
    return gzip.decompress(content)  # dictzip's files are gzip files


def with_header(content: bytes, name: str, mtime: int) -> bytes:
    """Return a gzip file with its header's name and time replaced and the compressed data as it is.

    Args:
        content: the whole file, of one gzip member.
        name: the name of the uncompressed file, for the field FNAME.
        mtime: when that was last changed, in seconds since 1970, for the field MTIME.

    Raises:
        ValueError: `content` is not gzip.

    Source: RFC 1952, section 2.3.
    """
    if content[:3] != b"\x1f\x8b\x08":
        raise ValueError(f"not a gzip file: begins with {content[:3]!r}")
    flags, start = content[3], 10
    if flags & _FEXTRA:
        start += 2 + struct.unpack_from("<H", content, start)[0]
    for field in (_FNAME, _FCOMMENT):
        if flags & field:
            start = content.index(0, start) + 1
    if flags & _FHCRC:
        start += 2
    # Bytes 8 and 9 say how hard the compressor tried and on which system; they stay.
    header = content[:3] + struct.pack("<BI", _FNAME, mtime) + content[8:10]
    return header + name.encode("latin-1") + b"\0" + content[start:]


def _apt_get(scratch: Path) -> list[str]:
    options = {
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",  # as root, apt would drop to a user who may not enter these folders
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "10",
        "Acquire::https::Timeout": "10",
    }
    return ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def _run(command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `command`, whatever its exit code, with its two outputs as one."""
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PrerequisiteError(f"{command[0]} not done within {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stdout:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return done


def _first_error(*outputs: str) -> str:
    """Return the line that says most: what could not be fetched (a warning to apt), else the first error."""
    lines = [line.strip() for output in outputs for line in output.splitlines()]
    for mark in ("W: Failed", "E: ", "dpkg-deb: error"):
        for line in lines:
            if line.startswith(mark):
                return line.removeprefix("W: ").removeprefix("E: ")
    return "no reason given"
