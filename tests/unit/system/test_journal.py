"""JSON Lines files: what one writer leaves unfinished costs no other line, and each look reads what is new."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.system import json_files
from cluster.system.json_files import LINE_BYTES, Journal, append_json, read_json_lines
from tests.support.waiting import together


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "lines.jsonl"


def known(value: Any) -> dict[str, Any]:
    if "step" not in value:
        raise ValueError
    return dict(value)


def test_lines_of_several_writers_do_not_mix(path):
    together(lambda at: [append_json(path, {"writer": at, "text": str(at) * 500}) for _ in range(20)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert 8 * 20 == len(lines)
    assert all(line["text"] == str(line["writer"]) * 500 for line in lines)


def test_a_line_cut_short_by_a_crash_is_left_out(path):
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [{"step": 1}, {"step": 2}] == list(read_json_lines(path))
    append_json(path, {"step": 3})
    assert [1, 2, 3] == [line["step"] for line in read_json_lines(path)]
    assert [1, 2, 3] == [line["step"] for line in Journal(path, known).read()]


def test_short_writes_do_not_cut_lines(path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:3]))
    together(lambda at: [append_json(path, {"step": at}) for _ in range(5)])
    monkeypatch.undo()
    assert 8 * 5 == len(list(read_json_lines(path)))


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
def test_what_is_no_line_is_left_out(path, line):
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


def test_a_file_that_is_replaced_or_cut_short_is_read_anew(path):
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


def test_whoever_keeps_the_lock_holds_up_nobody_for_long(path, monkeypatch):
    monkeypatch.setattr(json_files, "LOCK_TIMEOUT_S", 0.05)
    append_json(path, {"step": 1})
    with path.open("rb") as hoarder:
        assert json_files.lock(hoarder.fileno())
        append_json(path, {"step": 2})
    assert 2 == len(list(read_json_lines(path)))
