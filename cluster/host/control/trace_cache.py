"""Prepares a trace for TensorBoard's Profile tab, which caches what it computes from a trace beside it.

    python -m cluster.host.control.trace_cache FOLDER

TensorBoard's container can only read the runs, so the tab shows nothing of a trace that was not prepared. This runs in
a process of its own because the library prints; it is in `.venv` as one of TensorBoard's requirements.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster.system.paths import ROOT

VERSION = "cache_version.txt"
"""The file in which the plugin records its version."""
TIMEOUT_S = 60.0


def prepare(folder: Path) -> bool:
    """Prepare a trace's folder; return whether that worked. If not, only the tab of a container lacks the trace."""
    command = [sys.executable, "-m", "cluster.host.control.trace_cache", str(folder)]
    try:
        return not subprocess.run(command, cwd=ROOT, capture_output=True, timeout=TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return False


def main(folder: Path) -> None:
    """Compute what the tab requests first."""
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
