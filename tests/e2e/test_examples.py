"""The examples, each run by the commands of its README, from a copy of its folder; and the notebook."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from tests.e2e.scenario import ROOT, summary

EXAMPLES = ROOT / "examples"
NO_ENGINE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
WITHOUT_TENSORBOARD = "--tensorboard-port=0"
"""Added to the README's command: a user may hold TensorBoard's port."""


def run_to_end(command: list[str], **how: Any) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, **how)
    assert 0 == done.returncode, done.stdout


def commands(example: str) -> list[str]:
    return re.findall(r"^\$ (.*)$", (EXAMPLES / example / "README.md").read_text(), re.MULTILINE)


@pytest.fixture
def typed(clusters, tmp_path) -> Callable[[str], RunFolder]:
    """Types the commands of an example's README; returns the run that they make."""

    def type_in(example: str) -> RunFolder:
        shutil.copytree(EXAMPLES / example, tmp_path / "examples" / example)
        programs = tmp_path / "bin"
        programs.mkdir()
        words = {"python": "", "invoke": f"-m invoke --search-root {ROOT}", "tf-cluster": str(ROOT / "tasks.py")}
        for name, more in words.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {more} "$@"\n')
            (programs / name).chmod(0o755)
        before = set(clusters.runs_dir.glob("*/summary.json"))
        script = "\n".join(commands(example)).replace(" up ", f" up {WITHOUT_TENSORBOARD} ")
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        folders = {"RUNS_DIR": str(clusters.runs_dir), "DATA_DIR": str(tmp_path / "data")}
        environment = os.environ | folders | NO_ENGINE | {"PATH": path}
        run_to_end(["/bin/bash", "-ec", script], cwd=tmp_path, env=environment)
        (made,) = set(clusters.runs_dir.glob("*/summary.json")) - before
        return RunFolder(made.parent)

    return type_in


def metrics(run: RunFolder) -> dict[str, Any]:
    assert "succeeded" == summary(run)["state"]
    assert 2 == len(summary(run)["tasks"])
    found: dict[str, Any] = summary(run)["metrics"]
    return found


def test_every_example_is_listed_and_takes_two_commands():
    folders = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    assert folders == set(re.findall(r"\]\((\w+)/README.md\)", (EXAMPLES / "README.md").read_text()))
    assert {2} == {len(commands(name)) for name in folders}


@pytest.mark.long  # `test_scripts_run_unmodified.py` runs other scripts each time
def test_the_user_s_loop_must_find_the_line(typed):
    run = typed("own_loop")
    assert "succeeded" == summary(run)["state"]
    line = json.loads((run.work("chief") / "line.json").read_text())
    assert (3, 2) == (round(line["slope"]), round(line["offset"]))


@pytest.mark.long
@pytest.mark.parametrize("example", ["table", "autoencoder", "recommender", "forecast"])
def test_a_regression_must_learn(typed, example):
    assert metrics(typed(example))["eval_absolute_error"] < 0.3


@pytest.mark.long
@pytest.mark.parametrize("example", ["images", "text", "segmentation", "tagging", "fine_tuning"])
def test_a_classifier_must_learn(typed, example):
    assert metrics(typed(example))["eval_accuracy"] > 0.8


NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
EXECUTE = "from nbclient.cli import NbClientApp; NbClientApp.launch_instance()"


@pytest.mark.long
@pytest.mark.usefixtures("data")
def test_a_notebook_must_start_a_cluster_plot_its_metrics_and_stop_it(clusters, tmp_path):
    for library in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(library, reason=f"{library} is in requirements/dev.lock")
    folders = {name: str(tmp_path) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    command = [sys.executable, "-c", EXECUTE, f"--output={tmp_path / 'executed.ipynb'}", str(NOTEBOOK)]
    run_to_end(command, cwd=NOTEBOOK.parent, env=os.environ | clusters.settings | folders)
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    shown = [output for cell in cells for output in cell.get("outputs", [])]
    assert [] == [output for output in shown if output["output_type"] == "error"]
    assert 1 == sum("image/png" in output.get("data", {}) for output in shown)
    run = clusters.run("notebook")
    assert ("stopped", {"chief", "worker-0"}) == (summary(run)["state"], set(summary(run)["tasks"]))
    assert summary(run)["steps"] >= 150


def test_a_notebook_is_kept_with_what_it_shows():
    text = NOTEBOOK.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert list(range(1, len(cells) + 1)) == [cell["execution_count"] for cell in cells]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])
    assert "run folder <checkout>/runs/notebook" in text
