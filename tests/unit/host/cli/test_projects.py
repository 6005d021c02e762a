"""`new`: a project in a folder of the user's."""

import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cluster.host.cli.tasks import projects
from cluster.host.options import run_file
from cluster.system.errors import EXIT_DONE, EXIT_USAGE
from tests.support.command_line import exit_code, refusal


@pytest.mark.parametrize("kind", projects.KINDS)
def test_a_project_is_five_files_and_its_data(tmp_path, kind):
    assert EXIT_DONE == exit_code("new", folder=str(tmp_path / "mine"), kind=kind)
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {"model.py", "data.py", "run.toml", "test_project.py", "README.md"} == names - {"houses.csv"}
    assert "cd mine" in (tmp_path / "mine" / "README.md").read_text()
    request = run_file.read_run_file(str(tmp_path / "mine" / "run.toml")).request({}, ())
    assert request.workers == 1
    assert request.run_name().startswith("mine-")


def test_the_next_command_works_in_a_folder_that_no_checkout_is_around(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert EXIT_DONE == exit_code("new", folder="my proj")
    _, folder, _, command, *_ = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("next: "))
    assert ("my proj", "tf-cluster") == (folder, command)
    assert "$ tf-cluster up" in (tmp_path / folder / "README.md").read_text()


def test_a_script_becomes_a_project(tmp_path):
    (tmp_path / "train.py").write_text("print('trains')\n")
    assert EXIT_DONE == exit_code("new", folder=str(mine := tmp_path / "mine"), script=str(tmp_path / "train.py"))
    assert str(mine / "train.py") == run_file.read_run_file(str(mine / "run.toml")).options["script"]
    assert 0 == subprocess.run([sys.executable, "-m", "unittest", "-q"], cwd=mine).returncode


def test_the_tests_of_a_project_inside_the_checkout_are_run(monkeypatch):
    monkeypatch.chdir(projects.EXAMPLES / "table")
    monkeypatch.setattr(projects.subprocess, "run", lambda command, **_: SimpleNamespace(returncode=len(command)))
    assert 3 == refusal("test")[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"folder": "mine", "kind": "imges"},
        {"folder": "mine", "script": "missing.py"},
        {"folder": "mine", "kind": "text", "script": "missing.py"},
        {"folder": "taken"},
        {"folder": "taken/file"},
    ],
)
def test_a_project_that_cannot_be_created_leaves_nothing(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, _ = refusal("new", **options)
    assert EXIT_USAGE == code
    assert ["taken"] == [path.name for path in tmp_path.iterdir()]
