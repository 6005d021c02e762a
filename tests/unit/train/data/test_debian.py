"""Debian's package: the original gzip headers, and apt-get's failures in one line. apt-get and dpkg-deb are stubs."""

import gzip
import hashlib
import os
import struct
import zlib
from pathlib import Path

import pytest

from cluster.system.errors import PrerequisiteError
from train.data.prepare import debian
from train.data.prepare.download import SourceFile

PAYLOAD = b"pixels " * 100
FILES = tuple(SourceFile(f"{part}-labels-idx1-ubyte.gz", "http://x", 1, "") for part in ("train", "t10k"))


def gzip_file(flags: int, fields: bytes, mtime: int = 1, payload: bytes = PAYLOAD) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    data = compressor.compress(payload) + compressor.flush()
    header = b"\x1f\x8b\x08" + struct.pack("<BI", flags, mtime) + b"\x00\x03" + fields
    return header + data + struct.pack("<II", zlib.crc32(payload), len(payload))


ORIGINAL = gzip_file(8, b"train-images\0", mtime=1504176606)


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (0, b""),
        (8, b"another-name\0"),
        (16, b"a comment\0"),
        (4, b"\x03\x00abc"),
        (2 | 4 | 8 | 16, b"\x02\x00\x00\x01" + b"name\0" + b"comment\0" + b"\x12\x34"),
    ],
    ids=["bare", "name", "comment", "extra", "all fields"],
)
def test_a_rewritten_header_is_put_back_bit_for_bit(flags, fields):
    rewritten = gzip_file(flags, fields, mtime=1591348973)
    restored = debian.with_header(rewritten, "train-images", 1504176606)
    assert ORIGINAL == restored
    assert PAYLOAD == gzip.decompress(restored)


def test_what_is_not_gzip_is_refused():
    with pytest.raises(ValueError, match="not a gzip file"):
        debian.with_header(b"PK\x03\x04", "train-images", 0)


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Make `scripts` the only commands on the PATH."""
    folder.mkdir()
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def fetch(folder: Path, dataset: str = "fashion_mnist") -> None:
    folder.mkdir()
    debian.fetch(dataset, FILES, folder, lambda line: None)


def test_the_files_come_out_as_they_originally_were(tmp_path, monkeypatch):
    packed = tmp_path / "packed"
    packed.mkdir()
    for file in FILES:
        (packed / file.name).write_bytes(gzip_file(0, b"", mtime=1591348973, payload=file.name.encode()))
    stub(
        tmp_path / "bin",
        monkeypatch,
        apt_get='for word; do last=$word; done; [ "$last" = update ] || : > dataset-fashion-mnist_1_all.deb',
        dpkg_deb=f'[ -e "$2" ] && {os.path.realpath("/bin/cp")} {packed}/* "$3"',
    )
    fetch(tmp_path / "sources")
    assert {file.name for file in FILES} == {path.name for path in (tmp_path / "sources").iterdir()}
    for file, mtime in zip(FILES, (1504176606, 1504176627), strict=True):
        name = file.name.removesuffix(".gz")
        original = gzip_file(8, name.encode() + b"\0", mtime, payload=file.name.encode())
        got = (tmp_path / "sources" / file.name).read_bytes()
        assert hashlib.sha256(original).digest() == hashlib.sha256(got).digest()


@pytest.mark.parametrize(
    ("apt_get", "reason"),
    [
        ("echo 'E: Unable to locate package dataset-fashion-mnist'; exit 100", "Unable to locate package"),
        ("echo 'W: Failed to fetch X  Temporary failure resolving'; echo 'E: no'; exit 100", "Temporary failure"),
        ("exit 100", "no reason given"),
    ],
)
def test_a_failing_apt_gives_its_reason(tmp_path, monkeypatch, apt_get, reason):
    stub(tmp_path / "bin", monkeypatch, apt_get=apt_get, dpkg_deb="")
    with pytest.raises(PrerequisiteError, match=f"^dataset-fashion-mnist: .*{reason}"):
        fetch(tmp_path / "sources")


def test_an_apt_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(debian, "COMMAND_TIMEOUT_S", 0.2)
    stub(tmp_path / "bin", monkeypatch, apt_get=f"exec {os.path.realpath('/bin/sleep')} 60", dpkg_deb="")
    with pytest.raises(PrerequisiteError, match="apt-get not done within 0.2 s"):
        fetch(tmp_path / "sources")


def test_a_disk_that_apt_fills_is_no_missing_source(tmp_path, monkeypatch):
    stub(
        tmp_path / "bin", monkeypatch, apt_get="echo 'E: Write error - No space left on device'; exit 100", dpkg_deb=""
    )
    with pytest.raises(OSError, match="No space left on device"):
        fetch(tmp_path / "sources")


def test_another_system_has_no_apt(tmp_path, monkeypatch):
    stub(tmp_path / "bin", monkeypatch)
    with pytest.raises(PrerequisiteError, match="no apt-get and no dpkg-deb on this machine"):
        fetch(tmp_path / "sources")


def test_debian_has_no_mnist(tmp_path):
    with pytest.raises(PrerequisiteError, match="Debian has no package of mnist"):
        fetch(tmp_path / "sources", "mnist")
