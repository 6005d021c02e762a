"""What was imported is compared with what a new process would import, after any change to a tree."""

import os
import random
import shutil
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cluster.contract import kept_results
from cluster.host.runtime import loaded
from cluster.host.runtime.loaded import Loaded, sha256_of
from tests.support.waiting import wait_for

TREES = 1000
OWN = ("own/a.py", "own/part/b.py", "own/part/c.toml", "own/d.lock")
MODULES = {"m": "m.py", "pkg": "pkg/__init__.py", "pkg.n": "pkg/n.py"}
ADDED = ("own/part/new.py", "own/__pycache__/a.py", "first/m.py", "first/pkg/__init__.py", "first/notes.txt")
TEXTS = ("RATE = 1\n", "RATE = 2\n", "RATE = 30\n")


def write(file: Path, text: str = TEXTS[0]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A folder whose modules are all that counts as imported, from the second of two folders."""
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        module.__file__ = str(tmp_path / "tree" / "second" / MODULES[name])
    path = [str(tmp_path / "tree" / folder) for folder in ("first", "second")]
    for module in (loaded, kept_results):
        monkeypatch.setattr(module, "sys", SimpleNamespace(modules=modules, path=path))
    monkeypatch.setattr(loaded, "_mapped", lambda: ())
    monkeypatch.setattr(loaded, "SETTLED_S", 0.0)  # of this machine; the clock's ticks are waited for
    return renew(tmp_path / "tree")


def renew(tree: Path) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "first").mkdir(parents=True)
    for name in (*OWN, *(f"second/{file}" for file in MODULES.values())):
        write(tree / name)
    return tree


def now(folder: Path) -> float:
    """Wait until the file system's clock ticks; return its time in seconds since the epoch."""

    def touched() -> int:
        (folder / "probe").touch()
        return (folder / "probe").stat().st_ctime_ns

    first = touched()
    wait_for(lambda: touched() > first, "the clock", pause_s=0.001)
    return touched() / 1e9


def contents(tree: Path) -> dict[str, str]:
    """Return the contents that a new process has: our files, and each package from the first folder that has it."""
    found = {str(path): path.read_text() for path in (tree / "own").rglob("*.*") if "__pycache__" not in path.parts}
    for name, file in MODULES.items():
        top = MODULES[name.split(".")[0]]
        folder = "first" if (tree / "first" / top).exists() else "second"
        place = tree / folder / file
        found[name] = f"{folder} {place.read_text() if place.exists() else None}"
    return found


def change(tree: Path, draw: random.Random) -> None:
    """Change a file in a way that may leave its size and time as they were."""
    file, other = draw.sample([path for path in sorted(tree.rglob("*")) if path.is_file()], 2)
    times, text = (file.stat().st_atime_ns, file.stat().st_mtime_ns), draw.choice(TEXTS)
    scratch = tree.with_name("scratch")
    match draw.randrange(7):
        case 0:
            file.unlink()
        case 1:
            file.rename(file.with_name("renamed.py"))
        case 2:
            write(tree / draw.choice(ADDED), text)
        case 3:
            file.rename(other)
        case 4:  # as editors do
            scratch.write_text(text)
            os.utime(scratch, ns=times)
            scratch.rename(file)
        case 5:
            file.write_text(text)
            os.utime(file, ns=times)
        case 6:
            file.write_text(text)


@pytest.mark.slow
def test_no_change_to_a_tree_goes_unnoticed(tree):
    draw, outcomes = random.Random(20261126), []
    for _ in range(TREES):
        own, before = [renew(tree) / "own"], contents(tree)
        found = Loaded(own, sha256_of(own), now(tree.parent))
        assert found.certain
        change(tree, draw)
        outcomes.append((contents(tree) == before, found.is_current()))
    assert 0 == outcomes.count((False, True))
    assert outcomes.count((False, False)) > TREES / 3
    assert outcomes.count((True, True)) > TREES / 20  # not everything is refused


def test_what_changed_while_it_was_imported_is_not_certain(tree):
    own = [tree / "own"]
    before, later = sha256_of(own), time.time() + 10
    assert Loaded(own, before, later).certain
    assert not Loaded(own, before, time.time() - 10).certain  # others' files, which are not compared by content
    write(tree / "own" / "a.py", TEXTS[1])
    assert not Loaded(own, before, later).certain
