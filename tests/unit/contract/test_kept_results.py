"""Results of the user's functions are used again only while nothing that they read has changed."""

import os
import sys
from pathlib import Path

import pytest

from cluster.contract import kept_results, user_code

COMMAND, REPLY = ["python", "-m", "train.startup.preflight"], {"value": 1, "modules": [], "opened": [], "written": []}
READS = {
    "open": "open('table.csv').read()",
    "pathlib": "Path('table.csv').read_text()",
    "os": "os.read(os.open('table.csv', os.O_RDONLY), 100).decode()",
    "numpy": "str(np.loadtxt('table.csv').tolist())",
    "memory map": "bytes(np.memmap('table.csv', mode='r+')).decode()",
    "a listing": "str(sorted(os.listdir('pictures')))",
    "glob": "str(sorted(Path('pictures').glob('*.png')))",
    "a helper": "str(helper.VALUE)",
}
"""Ways to read what `change` changes, as expressions."""


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"modules": 1}', '{"modules": {"/nonexistent": "0"}, "value": 1}'])
def test_a_damaged_record_counts_as_none(tmp_path, damage):
    kept = kept_results.locate(tmp_path, COMMAND, [])
    kept_results.keep(kept, 0.0, REPLY, "text")
    assert kept_results.recall(kept) == (1, "text")
    kept.write_text(damage)
    assert kept_results.recall(kept) is None


def test_a_program_in_another_environment_is_another_one(tmp_path, monkeypatch):
    kept_results.keep(kept_results.locate(tmp_path, COMMAND, []), 0.0, REPLY, "")
    monkeypatch.setenv("WIDTH_OF_THEIR_MODEL", "64")
    assert kept_results.recall(kept_results.locate(tmp_path, COMMAND, [])) is None
    assert kept_results.recall(kept_results.locate(tmp_path, [*COMMAND, "--replicas=2"], [])) is None


@pytest.mark.parametrize("kind", ["modules", "opened"])
def test_a_result_during_which_an_input_was_edited_is_not_kept(tmp_path, kind):
    module, kept = tmp_path / "model.py", kept_results.locate(tmp_path, COMMAND, [])
    module.touch()
    written = module.stat().st_mtime
    kept_results.keep(kept, written - 1, REPLY | {kind: [str(module)]}, "")
    assert kept_results.recall(kept) is None
    kept_results.keep(kept, written + 1, REPLY | {kind: [str(module)]}, "")
    assert kept_results.recall(kept) == (1, "")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the modules and files of `READS`, of yesterday."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").touch()
    (tmp_path / "table.csv").write_text("1\n2\n")
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    for path in [*tmp_path.rglob("*"), tmp_path]:
        os.utime(path, (1, 1))
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
    import helper, numpy as np
    return {expression}
sys.exit(user_code.reply(body))
"""
    command = [sys.executable, "-B", "-c", lines]
    kept = kept_results.locate(folder / "data", command, [])
    before = kept_results.recall(kept)
    value = user_code.run(command, "it", "PRESET_TIMEOUT_S", environment=os.environ, kept=kept)
    return value, before and before[0]


def change(folder: Path, what: str) -> None:
    """Change what the expression of `READS` reads."""
    if what == "a helper":
        (folder / "helper.py").write_text("VALUE = 2\n")
    elif what in ("a listing", "glob"):
        (folder / "pictures" / "2.png").touch()
    else:
        (folder / "table.csv").write_text("3\n4\n")


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
    file, kept = tmp_path / "features.bin", kept_results.locate(tmp_path, COMMAND, [])
    file.write_bytes(b"12345678")
    os.utime(file, (1, 1))
    kept_results.keep(kept, 0.0, REPLY | {"written": [str(file)], "opened": [str(file)]}, "")
    assert kept_results.recall(kept) == (1, "")
    damage(file)
    assert kept_results.recall(kept) is None
