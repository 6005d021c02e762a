"""Whole files: many write, none reads half of anything, and what only one may create has one owner."""

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from cluster.system import files
from cluster.system.files import sha256
from cluster.system.json_files import DamagedError, create_json, read_json, write_json
from tests.support.waiting import together


def test_a_file_that_was_replaced_on_another_host_is_read_again(tmp_path, monkeypatch):
    path, opened = tmp_path / "value.json", []
    write_json(path, 7)

    def stale(path: Path, mode: str) -> IO[bytes]:
        opened.append(path)
        if len(opened) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return path.open("rb")

    monkeypatch.setattr(files, "open_file", stale)
    assert (7, 3) == (read_json(path), len(opened))
    monkeypatch.setattr(files, "STALE_READS", 2)
    opened.clear()
    with pytest.raises(OSError, match="Stale"):
        files.read_start(path, 9)


def test_a_reader_never_sees_half_a_file(tmp_path):
    path, over = tmp_path / "value.json", threading.Event()
    write_json(path, [0] * 5000)

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            write_json(path, [number] * 5000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            value = read_json(path)
            assert [value[0]] * 5000 == value
    finally:
        over.set()
        writer.join()
    assert [path] == list(tmp_path.iterdir())  # and no scratch file is left


def test_what_several_claim_belongs_to_one(tmp_path):
    path, claims = tmp_path / "owner.json", {}
    together(lambda at: claims.update({at: create_json(path, {"owner": at})}))
    (owner,) = [at for at, got_it in claims.items() if got_it]
    assert {"owner": owner} == read_json(path)
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [b"", b" \n", b'{"sta', b"[]", b"null", b"\xff\xfe{", b"[" * 100_000])
def test_what_a_power_failure_left_claims_nothing(tmp_path, left):
    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise ValueError

    path, claims = tmp_path / "owner.json", {}
    path.write_bytes(left)
    together(lambda at: claims.update({at: create_json(path, {"owner": at}, check)}))
    (owner,) = [at for at, got_it in claims.items() if got_it]
    assert {"owner": owner} == read_json(path)
    assert not create_json(path, {"owner": 99}, check)
    assert {".owner.json.lock", "owner.json"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_neither_does_what_is_no_file(make_run, make):
    run = make_run()
    make(run.control / "outcome.json")
    assert run.outcome is None
    assert [True, False] == [run.end("failed"), run.end("succeeded")]
    assert "failed" == run.outcome.state


def test_a_record_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    """A file system may write a rename before the bytes of the file, unless it is made to."""
    path, done = tmp_path / "value.json", []
    for call in ("fsync", "replace", "link"):
        real = getattr(os, call)

        def noted(*arguments: Any, call: str = call, real: Callable[..., Any] = real, **options: Any) -> Any:
            kind = "folder" if call == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode) else call
            done.append(kind)
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, noted)
    write_json(path, 1)
    assert ["fsync", "replace", "folder"] == done
    done.clear()
    create_json(tmp_path / "claim.json", 1)
    assert ["fsync", "link", "folder"] == done
    done.clear()
    write_json(path, 2, durable=False)
    assert ["replace"] == done


def test_a_write_that_is_interrupted_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    write_json(path, 1)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    for write in (write_json, create_json):
        with pytest.raises(KeyboardInterrupt):
            write(path, 2)
    assert 1 == read_json(path)
    assert [path] == list(tmp_path.iterdir())


def test_scratch_files_of_processes_that_are_called_the_same_differ(tmp_path, monkeypatch):
    """In containers process ids and threads are the same everywhere."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(threading, "get_ident", lambda: 7)
    seen: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, *rest, **options: (seen.append(old), real(old, *rest, **options)))
    for _ in range(50):
        write_json(tmp_path / "value.json", 1)
    assert 50 == len(set(seen))


def test_an_absent_file_is_its_default_and_a_hash_is_of_all_bytes(tmp_path):
    path = tmp_path / "file"
    assert {} == read_json(path, {})
    with pytest.raises(FileNotFoundError):
        read_json(path)
    for size in (0, 1, 1_000_000):
        path.write_bytes(b"a" * size)
        assert hashlib.sha256(b"a" * size).hexdigest() == sha256(path)


@pytest.mark.parametrize("size", [0, 10, 10**12])
def test_a_damaged_or_huge_record_is_not_there_and_that_is_said_once(tmp_path, caplog, size):
    path = tmp_path / "\x1b[2J.json"
    path.write_bytes(b"{" * min(size, 10))
    os.truncate(path, size)
    assert [None, None] == [read_json(path, None), read_json(path, None)]
    (said,) = caplog.messages
    assert said.isprintable()
    with pytest.raises(DamagedError):
        read_json(path)
