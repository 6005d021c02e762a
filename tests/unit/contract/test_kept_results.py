"""Results of the user's functions are used again only while nothing that they read has changed."""

import os
import sys
from pathlib import Path

import pytest

from cluster.contract import kept_results, user_code

COMMAND, REPLY = ["python", "-m", "train.startup.preflight"], {"value": {"a": 1}, "opened": [], "written": []}
DAMAGES = ["", "{", "[]", '{"files":1}', '{"files":{"/no":[0]},"value":{}}', '{"files":{},"value":1,"printed":""}']
READS = [
    ("open('table.csv').read()", "table.csv", "3\n4\n"),
    ("os.read(os.open('table.csv', os.O_RDONLY), 100).decode()", "table.csv", "3\n4\n"),
    ("bytes(np.memmap('table.csv', mode='r+')).decode()", "table.csv", "3\n4\n"),
    ("(os.listdir(tempfile.gettempdir()), keep_own(), open('table.csv').read())[2]", "table.csv", "3\n4\n"),
    ("str(sorted(os.listdir('pictures')))", "pictures/2.png", ""),
    ("str(helper.VALUE)", "helper.py", "VALUE = 2\n"),
    ("str(runpy.run_path('helper.py')['VALUE'])", "helper.py", "VALUE = 2\n"),
    ("str(importlib.util.find_spec('later') is None)", "later.py", ""),
    ("pkgutil.get_data('packed', 'table.csv').decode()", "packed/table.csv", "3\n4\n"),
]
"""Ways to read a file or folder, as expressions; and the file with which it changes, and that file's new content."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_counts_as_none(tmp_path, damage):
    kept = kept_results.locate(tmp_path, COMMAND, {})
    kept_results.keep(kept, 0.0, REPLY, "text")
    assert kept_results.recall(kept) == ({"a": 1}, "text")
    kept.write_text(damage)
    assert kept_results.recall(kept) is None


def test_a_program_in_another_environment_is_another_one(tmp_path, monkeypatch):
    kept_results.keep(kept_results.locate(tmp_path, COMMAND, os.environ), 0.0, REPLY, "")
    monkeypatch.setenv("WIDTH_OF_THEIR_MODEL", "64")
    assert kept_results.recall(kept_results.locate(tmp_path, COMMAND, os.environ)) is None
    assert kept_results.recall(kept_results.locate(tmp_path, [*COMMAND, "--replicas=2"], os.environ)) is None


def test_a_result_during_which_an_input_was_edited_is_not_kept(tmp_path):
    module, kept = tmp_path / "model.py", kept_results.locate(tmp_path, COMMAND, {})
    module.touch()
    written = module.stat().st_mtime
    kept_results.keep(kept, written - 1, REPLY | {"opened": [str(module)]}, "")
    assert kept_results.recall(kept) is None
    kept_results.keep(kept, written + 1, REPLY | {"opened": [str(module)]}, "")
    assert kept_results.recall(kept) == ({"a": 1}, "")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the modules and files of `READS`."""
    for file in (tmp_path / "pictures" / "1.png", tmp_path / "packed" / "__init__.py"):
        file.parent.mkdir()
        file.touch()
    for table in (tmp_path / "table.csv", tmp_path / "packed" / "table.csv"):
        table.write_text("1\n2\n")
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    return tmp_path


def call(folder: Path, expression: str) -> tuple[str, str | None]:
    """Return the value of an expression in a new process, and the value that was kept before, if any."""
    lines = f"""
import os, sys
sys.path.append({str(Path.cwd())!r})
from pathlib import Path
import tempfile
from cluster.contract import kept_results, user_code
sys.path.append({str(folder)!r})
os.chdir({str(folder)!r})
def keep_own():
    own = kept_results.locate(Path.cwd() / "own", [], {{}})
    kept_results.recall(own)
    kept_results.keep(own, 0.0, {REPLY}, "")
def body():
    import helper, importlib.metadata, importlib.util, numpy as np, packed, pkgutil, runpy
    importlib.metadata.version("numpy")  # lists all folders of sys.path
    return {{"value": {expression}}}
sys.exit(user_code.reply(body))
"""
    command = [sys.executable, "-B", "-c", lines]
    kept = kept_results.locate(folder / "data", command, {"PYTHONPATH": str(folder)})
    before = kept_results.recall(kept)
    value = user_code.run(command, "it", "PRESET_TIMEOUT_S", environment=os.environ, kept=kept)
    return value["value"], before and before[0]["value"]


@pytest.mark.parametrize(("expression", "file", "content"), READS)
def test_a_call_is_repeated_once_what_it_reads_changes(folder, expression, file, content):
    first, none = call(folder, expression)
    (folder / "notes.txt").write_text("not read")
    second, kept = call(folder, expression)
    assert (none, first, first) == (None, second, kept)
    before = [(path, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]]
    (folder / file).write_text(content)
    for path, time_ns in before:
        os.utime(path, ns=(time_ns, time_ns))
    third, kept = call(folder, expression)
    assert kept is None
    assert third != second


@pytest.mark.parametrize("damage", [Path.unlink, Path.touch, lambda path: path.write_bytes(b"")])
def test_a_call_is_repeated_once_its_own_files_are_gone_or_damaged(tmp_path, damage):
    file, kept = tmp_path / "features.bin", kept_results.locate(tmp_path, COMMAND, {})
    file.write_bytes(b"12345678")
    os.utime(file, (1, 1))
    kept_results.keep(kept, 0.0, REPLY | {"written": [str(file)], "opened": [str(file)]}, "")
    assert kept_results.recall(kept) == ({"a": 1}, "")
    damage(file)
    assert kept_results.recall(kept) is None


def test_data_in_memory_belongs_to_the_user_and_devices_do_not():
    assert kept_results.is_users("/dev/shm/table.csv")
    assert not kept_results.is_users("/dev/urandom")
