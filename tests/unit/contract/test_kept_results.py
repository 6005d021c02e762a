"""Results of the user's functions are used again only while nothing that they read has changed."""

import os
import sys
from pathlib import Path

import pytest

from cluster.contract import kept_results, user_code

COMMAND, REPLY = ["python", "-m", "train.startup.preflight"], {"value": {"a": 1}, "opened": [], "written": []}
DAMAGES = ["", "{", "[]", '{"files":1}', '{"files":{"/no":[0]},"value":{}}', '{"files":{},"value":1,"printed":""}']
READS = {
    "open": "open('table.csv').read()",
    "os": "os.read(os.open('table.csv', os.O_RDONLY), 100).decode()",
    "memory map": "bytes(np.memmap('table.csv', mode='r+')).decode()",
    "a listing": "str(sorted(os.listdir('pictures')))",
    "a helper": "str(helper.VALUE)",
    "a helper that is not imported": "str(runpy.run_path('helper.py')['VALUE'])",
    "a module that is not there": "str(importlib.util.find_spec('later') is None)",
    "a file of a package": "pkgutil.get_data('packed', 'table.csv').decode()",
}
"""Ways to read what `change` changes, as expressions."""


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
from cluster.contract import user_code
sys.path.append({str(folder)!r})
os.chdir({str(folder)!r})
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


def change(folder: Path, what: str) -> None:
    """Change what the expression of `READS` reads, and restore all times of modification."""
    before = [(path, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]]
    if "helper" in what:
        (folder / "helper.py").write_text("VALUE = 2\n")
    elif what == "a module that is not there":
        (folder / "later.py").touch()
    elif what == "a file of a package":
        (folder / "packed" / "table.csv").write_text("3\n4\n")
    elif what == "a listing":
        (folder / "pictures" / "2.png").touch()
    else:
        (folder / "table.csv").write_text("3\n4\n")
    for path, time_ns in before:
        os.utime(path, ns=(time_ns, time_ns))


@pytest.mark.parametrize("what", READS)
def test_a_call_is_repeated_once_what_it_reads_changes(folder, what):
    first, none = call(folder, READS[what])
    (folder / "notes.txt").write_text("not read")
    second, kept = call(folder, READS[what])
    assert (none, first, first) == (None, second, kept)
    change(folder, what)
    third, kept = call(folder, READS[what])
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
