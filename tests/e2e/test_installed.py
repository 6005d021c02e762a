"""The command `tf-cluster`, installed from the wheel alone: it has no checkout, and an environment in the user's cache.

`.ci/run` creates that environment from the locks; here it is the one that the tests run in.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.host.image import images
from cluster.system.errors import EXIT_PREREQUISITE
from cluster.system.files import ROOT
from cluster.system.json_files import read_json
from tests import fast

ENVIRONMENT = (
    "from tf_cluster.cluster import launcher; print(launcher.environment(launcher.cache_folder(), launcher.HERE))"
)


@pytest.fixture(scope="module")
def command(tmp_path_factory, copy_checkout) -> Path:
    fast.leave_out("starts a cluster")
    folder = tmp_path_factory.mktemp("installed")
    copy_checkout(folder / "sources", "tests/", "docs/", "benchmarks/")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    wheel = [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder), "./sources"]
    subprocess.run(wheel, cwd=folder, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "tool"], check=True)
    (made,) = folder.glob("*.whl")
    install = [*pip, "--python", folder / "tool" / "bin" / "python", "install", "--no-index", made]
    subprocess.run(install, check=True, capture_output=True)
    shutil.rmtree(folder / "sources")
    return folder / "tool" / "bin" / "tf-cluster"


@pytest.fixture
def call(command, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls the command in a folder of the user's, whose cache holds this environment and its data."""
    (project := tmp_path / "project").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("RUNS_DIR", "PYTHONPATH")}
    environment |= {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "DATA_DIR": str(tmp_path / "data"),
    }
    python = command.with_name("python")
    venv = subprocess.run([python, "-c", ENVIRONMENT], env=environment, check=True, capture_output=True, text=True)
    Path(venv.stdout.strip()).parent.mkdir(parents=True)
    Path(venv.stdout.strip()).symlink_to(sys.prefix)

    def run(*words: str, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [command, *words],
            cwd=project / "first" if (project / "first").exists() else project,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert expect == done.returncode, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.mark.extended
def test_a_new_project_must_be_tested_and_trained_without_a_checkout(call, tmp_path):
    call("new", "first", "--kind", "text")
    call("test")
    shown = call("up", "--file", "run.toml", "--tensorboard-port", "0").stdout
    (summary,) = (tmp_path / "project" / "first" / "runs").glob("first-*/summary.json")
    assert "succeeded" == read_json(summary)["state"]
    assert read_json(summary)["metrics"]["eval_accuracy"] > 0.8
    assert "tf-cluster up --resume" in shown
    assert "invoke" not in shown
    assert "invoke" not in call("--list").stdout + call("--help", "up").stdout + call("status").stdout


def test_tasks_and_images_are_made_of_the_installed_files_alone(call, tmp_path):
    shown = call("data.verify", expect=EXIT_PREREQUISITE).stdout  # nothing is prepared
    (code,) = (tmp_path / "cache" / "tf-cluster").glob("code-*/")
    assert str(code) in shown
    assert str(ROOT) not in shown
    context = {path.relative_to(ROOT) for path in images._context()}
    assert set() == {name for name in context if not (code / name).is_file()}


def test_an_environment_whose_python_is_gone_is_a_missing_prerequisite(call, tmp_path):
    (venv,) = (tmp_path / "cache" / "tf-cluster").glob("venv-*")
    venv.unlink()
    (venv / "bin").mkdir(parents=True)
    (venv / ".host").touch()
    (venv / "bin" / "python").symlink_to("gone")
    failed = call("--list", expect=EXIT_PREREQUISITE)
    assert f"error: {venv}/bin/python cannot be started (No such file or directory)" in failed.stderr


@pytest.mark.long  # how `make` reports that pip failed: `test_folder_names.py`
def test_an_environment_that_cannot_be_installed_is_a_missing_prerequisite_and_tried_again(call, tmp_path):
    (venv,) = (tmp_path / "cache" / "tf-cluster").glob("venv-*")
    venv.unlink()
    for _ in range(2):
        failed = call("--list", expect=EXIT_PREREQUISITE, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
        assert "error: pip failed" in failed.stderr
