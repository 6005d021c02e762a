"""Data from Debian's packages, for machines that reach a Debian mirror and little else.

`dataset-fashion-mnist` has the original four files, but with other gzip headers (no name, another time), so that their
sha256 differs from the one that TFDS records. Restoring the headers restores the original files, bit for bit.
`dict-jargon` has the compressed text of the Jargon File, which is in the public domain. `python3-sklearn` has the small
table of breast cancers in its example data, which is the only part of it that is used.
apt-get runs with separate lists and a separate cache: it needs no root and changes nothing on the machine.
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
"""Time at which Zalando compressed the files, in seconds since 1970, by the first part of their names."""

# The flags of a gzip member, RFC 1952, section 2.3.1.
_FHCRC, _FEXTRA, _FNAME, _FCOMMENT = 2, 4, 8, 16


def fetch(dataset: str, files: Sequence[SourceFile], folder: Path, say: Callable[[str], None]) -> None:
    """Extract the original `files` from Debian's package for `dataset` into `folder`."""
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
    # The update also fails for another unreachable repository, so only the download counts.
    update = _run([*_apt_get(scratch), "update"], scratch)
    download = _run([*_apt_get(scratch), "download", package], scratch)
    if download.returncode != 0:
        raise PrerequisiteError(f"{package}: {_first_error(download.stdout, update.stdout)}")
    archive = next(scratch.glob(f"{package}_*.deb"))
    unpack = _run(["dpkg-deb", "-x", str(archive), "unpacked"], scratch)
    if unpack.returncode != 0:
        raise PrerequisiteError(f"{archive.name}: {_first_error(unpack.stdout)}")
    unpacked = {path.name: path for path in (scratch / "unpacked").rglob("*") if path.is_file()}
    for file in files:
        packed = f"{file.name}.dz" if f"{file.name}.dz" in unpacked else file.name
        if packed not in unpacked:
            raise PrerequisiteError(f"{archive.name} holds no {packed}")
        content = unpacked[packed].read_bytes()
        (folder / file.name).write_bytes(content if packed.endswith(".csv") else _original(file.name, content))
    shutil.rmtree(scratch)


def _original(name: str, content: bytes) -> bytes:
    """Restore the original file: with its gzip header, or not compressed."""
    if name.endswith(".gz"):
        return with_header(content, name.removesuffix(".gz"), _MTIMES[name.partition("-")[0]])
    return gzip.decompress(content)  # dictzip's files are gzip files


def with_header(content: bytes, name: str, mtime: int) -> bytes:
    """Replace the name and the time in the header of a gzip file.

    Args:
        content: the file, with one gzip member.
        name: the name of the uncompressed file, for the field FNAME.
        mtime: the time of its last change, in seconds since 1970, for the field MTIME.

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
    # Bytes 8 and 9, the compression level and the system, are unchanged.
    header = content[:3] + struct.pack("<BI", _FNAME, mtime) + content[8:10]
    return header + name.encode("latin-1") + b"\0" + content[start:]


def _apt_get(scratch: Path) -> list[str]:
    options = {
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",  # otherwise apt as root would switch to a user without access to these folders
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "10",
        "Acquire::https::Timeout": "10",
    }
    return ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def _run(command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with any exit code, with its two outputs merged."""
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
    """Return the most informative line: a file that could not be fetched (a warning of apt), or the first error."""
    lines = [line.strip() for output in outputs for line in output.splitlines()]
    for mark in ("W: Failed", "E: ", "dpkg-deb: error"):
        for line in lines:
            if line.startswith(mark):
                return line.removeprefix("W: ").removeprefix("E: ")
    return "no reason given"
