"""Files: none reads half of anything, what only one may create has one owner, lines stay whole, scratch is removed."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest

from cluster.system import files, json_files
from cluster.system.files import remove_abandoned, scratch_folder
from cluster.system.json_files import (
    LINE_BYTES,
    DamagedError,
    Journal,
    append_json,
    create_json,
    read_json,
    read_json_lines,
    truncate_json,
    write_json,
)
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


@pytest.mark.parametrize("left", [None, b"", b" \n", b'{"sta', b"[]", b"null", b"\xff\xfe{", b"[" * 100_000])
def test_what_several_claim_belongs_to_one_and_what_a_power_failure_left_to_nobody(tmp_path, left):
    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise ValueError

    path, claims = tmp_path / "owner.json", {}
    if left is not None:
        path.write_bytes(left)
    together(lambda at: claims.update({at: create_json(path, {"owner": at}, check)}))
    (owner,) = [at for at, got_it in claims.items() if got_it]
    assert {"owner": owner} == read_json(path)
    assert not create_json(path, {"owner": 99}, check)
    assert {"owner.json", *([".owner.json.lock"] if left is not None else [])} == {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_neither_does_a_special_file(run, make):
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
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
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


HOLDS = """
import sys, time
from cluster.system.files import scratch_folder
with scratch_folder() as path:
    (path / "file").touch()
    print(path, flush=True)
    time.sleep(600)
"""


def test_a_scratch_folder_is_removed_at_the_end_and_never_before(temporary_files):
    with scratch_folder() as first:
        with scratch_folder() as second:
            remove_abandoned()
            assert {first, second} == set(temporary_files.iterdir())
        assert [first] == list(temporary_files.iterdir())
    assert [] == list(temporary_files.iterdir())


def test_the_scratch_folder_of_a_killed_process_is_removed_by_the_next(temporary_files):
    other = temporary_files / "tf-cluster-of-somebody-else"
    other.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        path = Path(process.stdout.readline().strip())
        remove_abandoned()
        assert (path / "file").exists()
        os.kill(process.pid, signal.SIGKILL)
    with scratch_folder() as mine:
        assert {mine, other} == set(temporary_files.iterdir())


def test_a_link_to_scratch_is_not_followed(temporary_files, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (temporary_files / "tf-cluster-tmp-link").symlink_to(elsewhere)
    remove_abandoned()
    assert (elsewhere / "file").exists()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "lines.jsonl"


def known(value: Any) -> dict[str, Any]:
    if "step" not in value:
        raise ValueError
    return dict(value)


def test_a_line_cut_short_by_a_crash_is_left_out(path):
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [{"step": 1}, {"step": 2}] == list(read_json_lines(path))
    append_json(path, {"step": 3})
    assert [1, 2, 3] == [line["step"] for line in read_json_lines(path)]
    assert [1, 2, 3] == [line["step"] for line in Journal(path, known).read()]


@pytest.mark.parametrize(("step", "last", "kept"), [(0, None, 0), (1, 1, 1), (3, 2, 2), (9, 9, 6)])
def test_a_file_is_truncated_after_the_last_line_to_keep(path, monkeypatch, step, last, kept):
    monkeypatch.setattr(json_files, "LINE_BYTES", 50)
    lines = ['{"step": 1}', '{"step": 2}', "x" * 120, "damaged", '{"step": 5}', '{"step": 9}']
    path.write_text("\n".join(lines) + '\n{"st')
    value = truncate_json(path, lambda value: known(value)["step"] <= step)
    assert (last, lines[:kept]) == (value and value["step"], path.read_text().splitlines())


def test_lines_of_several_writers_do_not_mix_although_every_write_is_short(path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:30]))
    together(lambda at: [append_json(path, {"writer": at, "text": str(at) * 500}) for _ in range(20)])
    monkeypatch.undo()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert 8 * 20 == len(lines)
    assert all(line["text"] == str(line["writer"]) * 500 for line in lines)


def test_a_disk_that_is_full_in_the_middle_of_a_line_costs_that_line_alone(path, monkeypatch):
    append_json(path, {"step": 1})
    real, left = os.write, [5]

    def write(descriptor: int, data: bytes) -> int:
        if not left:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: left.pop()])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        append_json(path, {"step": 2})
    monkeypatch.undo()
    append_json(path, {"step": 3})
    assert [1, 3] == [line["step"] for line in read_json_lines(path)]


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"[]", b"3", b"null", b"\xff\xfe", b"\0" * 100, b"[" * 100_000, b'{"step": 1' + b"0" * 5000 + b"}",
     b'{"step": "' + b"x" * 2 * LINE_BYTES + b'"}'],
)  # fmt: skip
def test_an_invalid_line_is_left_out(path, line):
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    assert [1, 2] == [found["step"] for found in read_json_lines(path)]
    assert [1, 2] == [found["step"] for found in Journal(path, known).read()]


def test_each_look_reads_only_what_is_new(path, monkeypatch):
    lines, parsed = Journal(path, known), []
    real: Callable[..., Any] = json_files.parse_json
    monkeypatch.setattr(json_files, "parse_json", lambda *words: parsed.append(words) or real(*words))
    for step in range(1, 20):
        append_json(path, {"step": step})
        with path.open("ab") as file:
            file.write(b"" if step % 3 else b'{"half')
        assert list(range(1, step + 1)) == [line["step"] for line in lines.read()]
    assert len(parsed) < 40


def test_a_file_that_is_replaced_or_truncated_is_read_again(path):
    lines = Journal(path, known)
    for step in (1, 2, 3):
        append_json(path, {"step": step})
    assert 3 == len(lines.read())
    os.truncate(path, 12)
    assert [1] == [line["step"] for line in lines.read()]
    path.rename(path.with_suffix(".old"))
    append_json(path, {"step": 9})
    assert [9] == [line["step"] for line in lines.read()]
    path.unlink()
    assert [] == lines.read()


def test_of_a_huge_file_the_newest_lines_are_read(path, monkeypatch):
    for bound in ("NEWEST_BYTES", "KEPT_BYTES"):
        monkeypatch.setattr(json_files, bound, 100)
    for step in range(1, 100):
        append_json(path, {"step": step})
    newest = [line["step"] for line in read_json_lines(path)]
    assert newest == list(range(newest[0], 100))
    assert 90 < newest[0]
    assert newest == [line["step"] for line in Journal(path, known).read()]


def test_a_lock_that_is_kept_delays_nobody_for_long(path, monkeypatch):
    monkeypatch.setattr(json_files, "LOCK_TIMEOUT_S", 0.05)
    append_json(path, {"step": 1})
    with path.open("rb") as hoarder:
        assert json_files.lock(hoarder.fileno())
        append_json(path, {"step": 2})
    assert 2 == len(list(read_json_lines(path)))
