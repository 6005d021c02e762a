"""Whole files: many write, none reads half of anything, and what only one may create has one owner."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest

from cluster.files import append_json, create_json, read_json, read_json_lines, sha256, write_json
from tests.unit.together import together


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
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


def test_what_several_claim_belongs_to_one(tmp_path: Path) -> None:
    path, claims = tmp_path / "owner.json", {}
    together(lambda at: claims.update({at: create_json(path, {"owner": at})}))
    (owner,) = [at for at, got_it in claims.items() if got_it]
    assert {"owner": owner} == read_json(path)
    assert [path] == list(tmp_path.iterdir())


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    together(lambda at: [append_json(path, {"writer": at, "text": str(at) * 500}) for _ in range(20)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert 8 * 20 == len(lines)
    assert all(line["text"] == str(line["writer"]) * 500 for line in lines)


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [{"step": 1}, {"step": 2}] == list(read_json_lines(path))


def test_an_absent_file_is_its_default(tmp_path: Path) -> None:
    assert {} == read_json(tmp_path / "absent.json", {})
    assert [] == list(read_json_lines(tmp_path / "absent.jsonl"))
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("size", [0, 1, 1_000_000])
def test_a_hash_is_that_of_all_the_bytes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * size)
    assert hashlib.sha256(b"a" * size).hexdigest() == sha256(path)
