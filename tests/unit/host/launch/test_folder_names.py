"""A checkout in a folder with any name: commands work there, and no part of the name is run."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ["a;touch PWNED; R&D", '-x \\ bob\'s "tf" a$b ü (1) $(touch PWNED) `touch PWNED`']
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
"-m venv "*)
  mkdir -p .venv/bin
  cp "$0" .venv/bin/python
  printf '%s\\n' "VIRTUAL_ENV=\\"$PWD/.venv\\"" >.venv/bin/activate
  printf '%s\\n' '#!/bin/sh' "'''exec' \\"$PWD/.venv/bin/python\\" \\"\\$0\\"" >.venv/bin/invoke ;;
"-m pip "*) echo "what pip prints"; exit "${PIP_CODE:-0}" ;;
esac
"""
"""Stands in for Python in `make`: it writes down how it is called, and makes the scripts that venv and pip make."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory, copy_checkout) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "checkout"
    copy_checkout(folder, "docs/", "tests/")
    return folder


@pytest.fixture(params=NAMES)
def checkout(request, tmp_path, sources, monkeypatch) -> Path:
    """A copy of the checkout in a folder with this name, which keeps its runs and data to itself."""
    folder = tmp_path / "clones" / request.param
    shutil.copytree(sources, folder)
    for name in ("RUNS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name)
    return folder


def call(folder: Path, *words: str, expect: int = 0, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert expect == done.returncode, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert [] == list(folder.parents[1].rglob("PWNED"))
    return done.stdout


def test_a_command_runs_in_the_folder(checkout):
    shown = call(checkout, sys.executable, "-m", "invoke", "data.verify", expect=3)
    assert f"cd {shlex.quote(str(checkout))} && " in shown


def make(folder: Path, *words: str, expect: int = 0, **environment: str) -> str:
    program = folder.parents[1] / "python3"
    program.write_text(PYTHON)
    program.chmod(0o755)
    calls = folder.parents[1] / "calls"
    calls.write_text("")
    output = call(folder, "make", f"PYTHON={program}", *words, expect=expect, CALLS=str(calls), **environment)
    return output + calls.read_text()


def test_make_calls_nothing_with_the_folder_s_name_in_a_shell(checkout):
    make(checkout, "help")
    output = make(checkout, "up", DATA_DIR="$(touch PWNED) `touch PWNED`")
    assert "-m invoke data.prepare\n" in output
    assert output.endswith("-m invoke up --workers 2\n")
    assert "what pip prints" not in output
    unsafe = set(str(checkout)) & set('$`"\\')
    assert bool(unsafe) is not (checkout / ".venv" / "bin" / "activate").exists()
    scripts = (path for path in (checkout / ".venv" / "bin").iterdir() if path.name != "python")
    assert not unsafe or [] == list(scripts)


@pytest.mark.parametrize("name", ["a:b", "a\nb"])
def test_a_folder_that_cannot_hold_an_environment_is_refused(tmp_path, sources, name):
    folder = tmp_path / "clones" / name
    shutil.copytree(sources, folder)
    assert 1 == make(folder, "setup", expect=2).count("error: ")
    assert not (folder / ".venv").exists()


def test_what_pip_prints_is_shown_where_it_fails_and_make_install_links_the_command(tmp_path, sources):
    folder = tmp_path / "clones" / "one"
    shutil.copytree(sources, folder)
    assert "what pip prints" in make(folder, "setup", expect=2, PIP_CODE="1")
    assert not (folder / ".venv" / ".host").exists()
    assert "what pip prints" not in make(folder, "setup")
    assert (folder / ".venv" / ".host").exists()
    assert "PATH" in make(folder, "install", f"BIN={tmp_path / 'bin'}")
    assert folder / "cluster" / "launcher.py" == (tmp_path / "bin" / "tf-cluster").resolve()
    assert os.access(tmp_path / "bin" / "tf-cluster", os.X_OK)


def test_the_command_of_a_checkout_without_an_environment_names_make_setup(tmp_path, sources):
    launched = [sys.executable, str(sources / "cluster" / "launcher.py"), "--list"]
    done = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True)
    assert 3 == done.returncode
    assert "make setup" in done.stderr
    assert 1 == len(done.stderr.splitlines())


def test_an_interrupt_while_the_tasks_are_imported_is_reported_by_the_task(sources):
    (venv := sources / ".venv" / "bin").mkdir(parents=True)
    (venv.parent / ".host").touch()
    (venv / "python").write_text(f'#!/bin/sh\nkill -INT $$\nexec {shlex.quote(sys.executable)} "$@"\n')
    (venv / "python").chmod(0o755)
    done = subprocess.run([sys.executable, sources / "cluster" / "launcher.py", "runs"], capture_output=True, text=True)
    shutil.rmtree(venv.parent)
    assert (130, "interrupted\n") == (done.returncode, done.stderr)


def test_the_command_of_a_checkout_runs_with_an_old_python(sources):
    older = "import collections.abc, os, runpy\ndel os._Environ.__ior__, collections.abc.Iterable.__class_getitem__\n"
    launched = f"{older}os.execv = print\nrunpy.run_path('cluster/launcher.py', run_name='__main__')"
    (venv := sources / ".venv").mkdir()
    (venv / ".host").touch()
    shown = call(sources, sys.executable, "-c", launched)
    shutil.rmtree(venv)
    assert shown.startswith(str(venv))


def test_an_environment_is_made_for_a_cpu_or_for_gpus(tmp_path, sources):
    planned = make(sources, "-n", "setup", f"VENV={tmp_path}/new", "ACCELERATOR=gpu")
    assert ("train-gpu.lock" in planned, "train-cpu.lock" in planned) == (True, False)
    (tmp_path / ".host").touch()  # one for a CPU, as it was made before this choice
    make(sources, "setup", f"VENV={tmp_path}", "ACCELERATOR=gpu", expect=2)
    launched = [sys.executable, str(sources / "cluster" / "launcher.py"), "--list"]
    assert 2 == subprocess.run(launched, env=os.environ | {"ACCELERATOR": "tpu"}, capture_output=True).returncode
