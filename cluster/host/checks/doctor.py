"""Prerequisite checks, each with its fix."""

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import asdict
from typing import Any

from cluster.host.checks import gpus
from cluster.host.image import locks
from cluster.host.launch import folders
from cluster.host.runtime import registry, tensorboard
from cluster.host.runtime.base import Finding
from cluster.system.messages import COMMAND, short_path

_HAS_CUDA = any(importlib.metadata.distributions(name="tensorflow"))  # `tensorflow-cpu` is another distribution
LOCKS = ("host", "train-gpu" if _HAS_CUDA else "train-cpu", "tensorboard")


def examine_machine(port: int = tensorboard.PORT) -> list[Finding]:
    """Return the findings about this machine. Nothing is changed, and only `gpus` starts a container."""
    findings = [_python(), _packages(), _processor(), _disk(), _data(), _port(port)]
    for runtime in registry.RUNTIMES.values():
        findings += runtime.examine()
    return findings + gpus.examine_gpus()


def report(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings, and whether none has failed."""
    return {"ok": all(f.state != "failed" for f in findings), "findings": [asdict(f) for f in findings]}


def _python() -> Finding:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", version)
    return Finding("python", "failed", version, "install Python 3.11 to 3.13, delete .venv and run `make setup`")


def _packages() -> Finding:
    wrong = []
    for name, version in locked():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        if installed != version:
            wrong.append(f"{name} {installed} instead of {version}")
    if wrong:
        return Finding("packages", "failed", ", ".join(wrong[:5]), "make setup")
    return Finding("packages", "ok", f"as locked in requirements/ ({', '.join(LOCKS)})")


def locked() -> list[tuple[str, str]]:
    """Return the packages and versions that the locks pin for this machine."""
    return sorted({(pin.name, pin.version) for lock in LOCKS for pin in locks.pins(lock) if pin.applies()})


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        return Finding("processor", "ok", f"{cores} cores, {platform.machine()}")
    return Finding("processor", "warning", "1 core", "a cluster of several tasks is slow on one core")


def _disk() -> Finding:
    folder = folders.runs_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK)
    if free >= folders.MIN_FREE_BYTES and writable:
        return Finding("disk", "ok", f"{free / 2**30:.1f} GiB free for {short_path(folders.runs_dir())}")
    detail = f"{free / 2**20:.0f} MiB free" if writable else f"{folder} cannot be written"
    return Finding("disk", "failed", detail, "free space, or set RUNS_DIR to another folder")


def _data() -> Finding:
    folder = folders.data_dir() / "arrays"
    ready = sorted(path.parent.name for path in folder.glob("*/arrays.json"))
    if ready:
        return Finding("data", "ok", ", ".join(ready))
    detail = f"nothing is prepared in {short_path(folders.data_dir())}"
    return Finding("data", "warning", detail, f"{COMMAND} data.prepare")


def _port(port: int) -> Finding:
    if problem := tensorboard.port_problem(folders.runs_dir(), port):
        return Finding("tensorboard port", "warning", problem, "nothing to do: TensorBoard takes a free port")
    return Finding("tensorboard port", "ok", f"127.0.0.1:{port} is free or ours")
