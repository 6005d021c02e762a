"""The notebook, run from its first cell to its last."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.scenario import ROOT, summary

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
EXECUTE = "from nbclient.cli import NbClientApp; NbClientApp.launch_instance()"


@pytest.mark.long
@pytest.mark.usefixtures("data")
def test_a_notebook_must_start_a_cluster_plot_its_metrics_and_stop_it(clusters, tmp_path):
    for library in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(library, reason=f"{library} is in requirements/dev.lock")
    folders = {name: str(tmp_path) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, f"--output={tmp_path / 'executed.ipynb'}", str(NOTEBOOK)],
        cwd=NOTEBOOK.parent,
        env=os.environ | clusters.settings | folders,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert 0 == done.returncode, done.stdout
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
