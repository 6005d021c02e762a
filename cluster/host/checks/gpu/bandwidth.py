"""How fast a plan's GPUs all-reduce a tensor: the program that measures it is started, and its output judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from cluster.contract import spec
from cluster.contract.findings import Finding
from cluster.host.checks.gpu import inside
from cluster.host.gpu import devices, placement
from cluster.host.gpu.devices import Machine
from cluster.host.gpu.placement import Placement
from cluster.host.image import engine, images
from cluster.host.launch import planning
from cluster.host.runtime import toolkit
from cluster.host.runtime.local_runtime import visible
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.paths import ROOT

CHECK = "gpu bandwidth"
TIMEOUT_S = 300.0
"""Importing TensorFlow, connecting NCCL and measuring 4 sizes take a minute, on idle GPUs too."""


def examine(gpus: str = "") -> Finding:
    """Measure the all-reduce between the GPUs that `up --workers 0 --gpus GPUS` would train on.

    Raises:
        UsageError: `gpus` is not understood.
    """
    requested = placement.parse(gpus or "all", "")
    if requested is None:
        raise UsageError(f"--bandwidth with --gpus {gpus}: nothing to measure; use --gpus all, or leave it out")
    try:
        machine = devices.machine("--bandwidth", with_instances=any(name.startswith("MIG-") for name in requested.ids))
        placed = placement.place(requested, machine, spec.build(workers="0"), planning.busy())
    except ClusterError as error:  # its message has the fix
        return Finding(CHECK, "failed", str(error))
    ids = placed.of("chief")
    if len(ids) == 1:
        return Finding(CHECK, "ok", f"GPU {ids[0]} alone: nothing to all-reduce")
    try:
        code, text = _run(placed)
    except PrerequisiteError as error:
        return Finding(CHECK, "failed", f"nothing here can measure it: {error}", inside.BUILD)
    return judge(code, text, machine, ids)


def judge(code: int, text: str, machine: Machine, ids: tuple[str, ...]) -> Finding:
    """Return the finding about the output of `train.bandwidth` on these GPUs."""
    last = text.splitlines()[-1] if text else "no output"
    fix = "see what NCCL logs with NCCL_DEBUG=INFO, and `nvidia-smi topo -m`"
    if code:
        return Finding(CHECK, "failed", f"all-reduce between GPU {','.join(ids)} fails: {last}", fix)
    try:
        # NCCL prints its warnings to the same stream.
        report = json.loads(next((line for line in reversed(text.splitlines()) if line.startswith("{")), last))
        used, measured = report["devices"], [(size["mib"], size["bus_gb_s"]) for size in report["sizes"]]
        shown = ", ".join(f"{speed:.1f} at {mib} MiB" for mib, speed in measured)
    except (ValueError, KeyError, TypeError):
        return Finding(CHECK, "failed", f"train.bandwidth printed {last[:100]!r} instead of what it measured", fix)
    if not measured or used != [f"GPU:{index}" for index in range(len(ids))]:
        return Finding(CHECK, "failed", f"it was measured on {', '.join(used)} instead of {len(ids)} GPUs", fix)
    used_links = {link for pair, link in machine.links.items() if set(pair) <= set(ids)}
    over = f" over {', '.join(sorted(used_links))}" if used_links else ""
    return Finding(CHECK, "ok", f"GPU {','.join(ids)}{over}: bus GB/s {shown}")


def _run(placed: Placement) -> tuple[int, str]:
    """Run the program in the GPU image, or in this environment without one; return its exit code and output."""
    ids = placed.of("chief")
    words = ["-m", "train.bandwidth", "--devices", str(len(ids))]
    ways = inside.ways() if engine.probe().ready else []
    if ways and inside.has_image():
        return inside.run(ways[0], ids, placed.environment("chief"), *words, timeout_s=TIMEOUT_S)
    missing = f"{images.train_image('gpu')} is not built" if ways else "no engine provides GPUs to containers"
    try:
        toolkit.check_here()
    except PrerequisiteError as error:
        raise PrerequisiteError(f"{missing}, and this environment has no TensorFlow with CUDA") from error
    environment = os.environ | visible(placed, "chief")
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"it did not end in {TIMEOUT_S:g} s"
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()
