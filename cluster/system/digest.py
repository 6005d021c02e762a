"""Prepares a trace for TensorBoard's Profile tab, which keeps what it works out of a trace beside it.

    python -m cluster.system.digest FOLDER

TensorBoard's container may only read the runs, and then the tab shows nothing of a trace that was not prepared. In a
process of its own: the library prints, and it is in `.venv` as part of TensorBoard's requirements.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster.paths import ROOT

VERSION = "cache_version.txt"
"""The plugin's own name for the file that says by which version of it the rest was worked out."""
TIMEOUT_S = 60.0


def digest(folder: Path) -> bool:
    """Prepare a trace's folder; return False where that cannot be done here, which is nobody's loss but the tab's."""
    command = [sys.executable, "-m", "cluster.system.digest", str(folder)]
    try:
        root = ROOT
        done = subprocess.run(command, cwd=root, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(folder: Path) -> None:
    """Work out what the tab asks for first."""
    from xprof import version
    from xprof.convert import raw_to_tool_data

    traces = [str(path) for path in folder.glob("*.xplane.pb")]
    hosts = [Path(path).name.removesuffix(".xplane.pb") for path in traces]
    raw_to_tool_data.xspace_to_tool_names(traces)
    for tool in ("trace_viewer@", "overview_page"):
        data, _ = raw_to_tool_data.xspace_to_tool_data(traces, tool, {"trace_viewer_options": {}, "hosts": hosts})
        if not data:
            sys.exit(f"{folder}: no {tool} can be made of {traces}")
    (folder / VERSION).write_text(version.__version__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
