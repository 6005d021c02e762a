"""What the nodes of a Slurm cluster have of what a run needs, in one short step on all of them."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from cluster.contract import spec
from cluster.contract.findings import Finding
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import hosts
from cluster.system import processes
from cluster.system.json_files import write_json
from cluster.system.paths import ROOT

START_S = 60
"""How long the nodes may be busy before the check gives up."""
STEP_S = 240.0
OURS = "error: "
"""How a line of this checkout's own begins; those of Slurm name the program first."""
JOIN_S = 20.0
"""How long each node waits for the others to see the folder of the check."""
FIXES = hosts.Fixes(
    silent=f"let every node see {ROOT}, its environment and RUNS_DIR under these paths; wait where nodes are busy",
    data="set DATA_DIR to a shared folder",
    network="open ports 20000 to 31999 between the nodes, at the addresses that Slurm has",
)


def examine(runs_dir: Path, data_dir: Path) -> list[Finding]:
    """Return what the nodes have, each with its fix."""
    code, printed, complained = processes.run(["sinfo", "--Node", "--noheader", "--format=%N", "--responding"], STEP_S)
    nodes = sorted(set(printed.split()))
    if code or not nodes:
        return [Finding("hosts", "failed", f"sinfo names none: {complained.strip()[:200]}", "run this on a login node")]
    runs_dir.mkdir(parents=True, exist_ok=True)
    run = RunFolder(runs_dir / f".check-{secrets.token_hex(4)}")
    try:
        run.create()
        write_json(run.cluster, spec.build(workers=len(nodes) - 1).to_json())
        reports, error = _step(run, data_dir, len(nodes))
        return hosts.judge(nodes, reports, {"": error}, FIXES)
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _step(run: RunFolder, data_dir: Path, count: int) -> tuple[list[dict[str, Any]], str]:
    """Return what the nodes say, and the last line of what Slurm says beside that."""
    command = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--immediate={START_S}"]
    command += ["--time=5", "--job-name=tf-cluster-check", f"--chdir={ROOT}"]
    command += [f"--export=PATH,HOME,RUN_DIR={run.path},DATA_DIR={data_dir},RENDEZVOUS_TIMEOUT_S={JOIN_S:g}"]
    _, printed, complained = processes.run(
        [*command, sys.executable, "-m", "cluster.agent.schedulers.slurm", "check"], STEP_S
    )
    said = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    errors = [line for line in complained.splitlines() if "error" in line.lower()]
    errors.sort(key=lambda line: not line.startswith(OURS))  # which says more than `srun` about the same
    return said, errors[0].removeprefix(OURS)[:300] if errors else ""
