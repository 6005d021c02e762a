"""What nodes have of what a run needs: `invoke doctor --runtime slurm`, in one short step on all of them."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from cluster import spec
from cluster.errors import UsageError
from cluster.findings import Finding
from cluster.paths import ROOT
from cluster.run.folder import RunFolder
from cluster.runtime import registry
from cluster.system import processes
from cluster.system.json_files import write_json

START_S = 60
"""How long the nodes may be busy before the check gives up."""
STEP_S = 240.0
SKEW_S = 2.0
"""Largest difference of two clocks that passes: heartbeats that are 8 s old count as lost."""


def examine(runtime: str, runs_dir: Path, data_dir: Path) -> list[Finding]:
    """Return what the nodes of a runtime have, each with its fix.

    Args:
        runtime: of which; it must be one that queues jobs.
        runs_dir: the folder of all runs.
        data_dir: the folder of prepared data.

    Raises:
        UsageError: the runtime has no nodes.
    """
    if not registry.get(runtime).is_remote:
        raise UsageError(f"--runtime {runtime}: it has no other machines; leave it out")
    code, printed, complained = processes.run(["sinfo", "--Node", "--noheader", "--format=%N", "--responding"], STEP_S)
    nodes = sorted(set(printed.split()))
    if code or not nodes:
        return [Finding("nodes", "failed", f"sinfo names none: {complained.strip()[:200]}", "run this on a login node")]
    runs_dir.mkdir(parents=True, exist_ok=True)
    run = RunFolder(runs_dir / f".check-{secrets.token_hex(4)}")
    try:
        run.create()
        write_json(run.cluster, spec.build(workers=len(nodes) - 1).to_json())
        return judge(nodes, *_step(run, data_dir, len(nodes)))
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _step(run: RunFolder, data_dir: Path, count: int) -> tuple[list[dict[str, Any]], str]:
    """Return what the nodes say, and the last line of what Slurm says beside that."""
    command = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--immediate={START_S}"]
    command += ["--time=5", "--job-name=tf-cluster-check", f"--chdir={ROOT}"]
    command += [f"--export=PATH,HOME,RUN_DIR={run.path},DATA_DIR={data_dir}"]
    _, printed, complained = processes.run(
        [*command, sys.executable, "-m", "cluster.agent.schedulers.slurm", "check"], STEP_S
    )
    said = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    errors = [line for line in complained.splitlines() if "error" in line.lower()]
    return said, errors[0][:300] if errors else ""


def judge(nodes: list[str], said: list[dict[str, Any]], error: str) -> list[Finding]:
    """Return the findings.

    Args:
        nodes: that respond to Slurm.
        said: what each of them says of itself, as `cluster.agent.schedulers.slurm.check` returns it.
        error: what Slurm says beside that.
    """
    missing = sorted({*nodes} - {each["node"] for each in said})
    if missing:
        fix = f"let every node see {ROOT}, its environment and RUNS_DIR under these paths; wait where nodes are busy"
        found = Finding("nodes", "failed", f"no answer from {', '.join(missing)}: {error or 'no reason given'}", fix)
    else:
        found = Finding("nodes", "ok", f"{len(nodes)} run this checkout and see the folder of runs")
    blind = [each["node"] for each in said if not each["data"]]
    data = Finding("data on nodes", "ok", "its folder is there")
    if blind:
        data = Finding("data on nodes", "failed", f"not on {', '.join(blind)}", "set DATA_DIR to a shared folder")
    skew = max((each["time"] for each in said), default=0.0) - min((each["time"] for each in said), default=0.0)
    clock = Finding("clocks", "ok", f"within {skew:.1f} s, the start of the step included")
    if skew > SKEW_S:
        clock = Finding("clocks", "warning", f"differ by up to {skew:.1f} s", "have every node keep time by NTP")
    unreached = [each["unreached"] for each in said if each["unreached"]]
    network = Finding("network of nodes", "ok", "every node reaches every other at the address that Slurm has")
    if unreached:
        network = Finding("network of nodes", "failed", unreached[0], "open ports 20000 to 31999 between the nodes")
    return [found, *([data, clock, network] if said else [])]
