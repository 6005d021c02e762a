"""Logs: bounded whatever a program prints, and read as they grow."""

import io
import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
import types
from pathlib import Path

import pytest

from cluster.agent.task_process import Script, TaskProcess, Trainer
from cluster.contract.run import logs
from cluster.contract.run.logs import GAP, LINE_BYTES, LogReader
from tests.support.waiting import wait_for


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "chief.log"


def read(reader: LogReader, *, ended: bool = True) -> list[bytes]:
    return list(reader.lines(ended=ended))


@pytest.mark.parametrize("chunk", [1, 7, 100, 2**16])
def test_what_is_printed_is_logged(log, monkeypatch, chunk):
    monkeypatch.setattr(logs, "CHUNK_BYTES", chunk)
    printed = io.BytesIO(b"step 1\r\n\n\xff\x00\nnoise here\n  last line  ")
    last: list[str] = []
    logs.copy_output(io.BufferedReader(printed), log, last, (b"noise",))
    assert ["step 1", "\ufffd\0", "  last line"] == last
    assert b"step 1\r\n\n\xff\x00\n  last line  \n" == log.read_bytes()


def test_a_program_that_never_ends_a_line_takes_no_memory(tmp_path, log, monkeypatch):
    prints = ["head", "-c", "60000000", "/dev/zero"]
    with Path(os.devnull).open("w") as nowhere, subprocess.Popen(prints, stdout=subprocess.PIPE) as program:
        monkeypatch.setattr(sys, "stdout", nowhere)
        tracemalloc.start()
        logs.copy_output(program.stdout, log, [])
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown < 20 * 2**20
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 3 * (logs.PART_BYTES + LINE_BYTES + len(GAP))


def test_of_a_log_without_end_the_beginning_and_the_end_are_kept(log, monkeypatch):
    monkeypatch.setattr(logs, "PART_BYTES", 1000)
    for number in range(1000):
        logs.append_output(log, b"line %d\n" % number)
    names = {"chief.log", "chief.log.first", "chief.log.previous", "chief.log.marks"}
    assert names == {path.name for path in log.parent.iterdir()}
    lines = read(LogReader(log))
    at = lines.index(GAP.strip())
    numbers = [int(line.split()[1]) for line in lines[:at]]
    assert numbers == list(range(len(numbers)))
    newest = [int(line.split()[1]) for line in lines[at + 1 :]]
    assert newest == list(range(newest[0], 1000))
    assert all(path.stat().st_size <= 1010 + len(GAP) for path in log.parent.iterdir())


def test_following_a_log_misses_and_repeats_nothing(log, monkeypatch):
    monkeypatch.setattr(logs, "PART_BYTES", 1000)
    reader, seen, numbers = LogReader(log), [], itertools.count(1)
    for size in itertools.islice(itertools.cycle([0, 1, 5, 30]), 60):
        for number in itertools.islice(numbers, size):
            logs.append_output(log, b"line %d\n" % number)
        seen += read(reader, ended=False)
    lines = [line for line in seen if line != GAP.strip()]
    assert [b"line %d" % number for number in range(1, 15 * 36 + 1)] == lines


@pytest.mark.parametrize(("part_bytes", "reused"), [(2**20, False), (40, False), (40, True)])
def test_a_log_is_read_from_a_time_on(log, monkeypatch, part_bytes, reused):
    monkeypatch.setattr(logs, "PART_BYTES", part_bytes)
    now = 1000.0
    monkeypatch.setattr(logs, "time", types.SimpleNamespace(time=lambda: now, monotonic=lambda: now))
    for _ in range(38):  # in five parts of eight lines, of which the second and third are gone
        logs.append_output(log, b"%d\n" % now)
        now += 7.0
    if reused:  # the newest part has the inode of one that is gone
        marks, inode = log.with_name("chief.log.marks"), str(log.stat().st_ino)
        lines = [line.split() for line in marks.read_text().splitlines()]
        marks.write_text("".join(f"{at} {inode if 8 <= n < 16 else i} {s}\n" for n, (at, i, s) in enumerate(lines)))
    kept = [int(line) for line in read(LogReader(log)) if line != GAP.strip()]
    for since in (1000.0, 1050.0, 1057.0, 1105.5, 1133.0, 1200.0, 1250.0, now + 10):
        reader = LogReader(log)
        reader.skip_until(since)
        times = [int(line) for line in read(reader) if line != GAP.strip()]
        assert [at for at in kept if at >= since] == [at for at in times if at >= since]
        assert all(at >= since - logs.MARK_S for at in times)


def test_half_a_line_is_shown_once_it_is_whole_or_the_last(log):
    reader = LogReader(log)
    assert [] == read(reader, ended=False)
    log.write_bytes(b"one\nha")
    assert [b"one"] == read(reader, ended=False)
    assert [] == read(reader, ended=False)
    with log.open("ab") as file:
        file.write(b"lf\nend")
    assert [b"half"] == read(reader, ended=False)
    assert [b"end"] == read(reader)
    assert [] == read(reader)


def test_of_a_huge_log_the_end_is_read(log, monkeypatch):
    monkeypatch.setattr(logs, "PART_BYTES", 10 * LINE_BYTES)
    with log.open("wb") as file:
        file.truncate(10**12)
        file.seek(10**12)
        file.write(b"\nend\n")
    reader = LogReader(log)
    lines = read(reader, ended=False)
    assert (GAP.strip(), b"end") == (lines[0], lines[-1])
    assert len(lines) < 15
    assert [] == read(reader)
    assert "end" == logs.last_line(log)


def run_program(kind: type[TaskProcess], lines: str, log: Path) -> TaskProcess:
    program = kind([sys.executable, "-c", lines], dict(os.environ), log, log.with_name("work"))
    program.open_gate({})
    assert 0 == program.wait(30)
    program.end(0)
    return program


def test_a_log_that_cannot_be_written_holds_up_no_program(log):
    log.mkdir()
    run_program(Script, "print('x' * 10**6)", log)


def test_two_programs_of_a_task_print_to_one_log(log, monkeypatch):
    monkeypatch.setattr(logs, "PART_BYTES", 10_000)
    writers = [
        threading.Thread(target=lambda at=at: [logs.append_output(log, b"%d " % at * 50 + b"\n") for _ in range(300)])
        for at in range(3)
    ]
    reader, seen = LogReader(log), []
    for writer in writers:
        writer.start()
    wait_for(lambda: seen.extend(read(reader)) or not any(writer.is_alive() for writer in writers), "the writers")
    seen += read(reader)
    assert all(len(set(line.split())) == 1 for line in seen if line != GAP.strip())


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("plain  ", "plain"),
        ("10 %\r20 %\r", "20 %"),
        ("100 left\r9", "900 left"),
        ("100 left\r9\x1b[K", "9"),
        ("100 left\x1b[2K\rdone", "done"),
        ("abc\b\bXY", "aXY"),
        ("\b\b\ra\r\n", "a"),
        ("\x1b[?25l\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2A", "red"),
        ("half an escape \x1b[3", "half an escape 3"),
    ],
)
def test_a_line_is_rendered_as_a_terminal_shows_it_in_the_end(printed, shown):
    assert shown == logs.render_line(printed)
    assert "\x1b[31mred\x1b[m" == logs.render_line("\x1b[1mx\x1b[0m\r\x1b[31mred\x1b[0m", styled=True)


@pytest.mark.parametrize("chunk", [1, 50, 2**16])
def test_the_state_of_a_progress_bar_is_logged_before_its_line_ends(log, monkeypatch, chunk):
    monkeypatch.setattr(logs, "CHUNK_BYTES", chunk)
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as stream, os.fdopen(write_end, "wb", buffering=0) as program:
        copying = threading.Thread(target=logs.copy_output, args=(stream, log, []))
        copying.start()
        program.write(b"Epoch 1/2\r\n\b\b\r1/9 ---\b\b\r2/9 ---\b\b\r3/9")
        wait_for(lambda: log.exists() and "2/9 ---" == logs.last_line(log), "the second state")
        program.close()
        copying.join()
    assert [b"Epoch 1/2\r", b"\b\b\r1/9 ---\b\b\r2/9 ---\b\b\r3/9"] == read(LogReader(log))


PRINTS = """
print("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR")
print("I0000 00:00:1.5 7 port.cc:153] oneDNN custom operations are on. You may see slightly different results")
print("step 1")
"""


@pytest.mark.parametrize(("kind", "lines"), [(Trainer, 1), (Script, 3)])
def test_what_tensorflow_says_at_any_log_level_is_logged_of_a_script_alone(log, kind, lines):
    program = run_program(kind, PRINTS, log)
    assert lines == len(log.read_text().splitlines())
    assert "exit code 0, last line: step 1" == program.error(0)
