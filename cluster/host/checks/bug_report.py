"""`invoke env`: one block for a bug report. It has no secret, and no user's name: paths begin at the home folder."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
from pathlib import Path

from cluster.contract import settings
from cluster.contract.run.folder import RunFolder
from cluster.host.gpu import devices
from cluster.host.image import checkout, engine
from cluster.host.launch import folders
from cluster.host.view.columns import plain_lines
from cluster.system import memory
from cluster.system.errors import ClusterError
from cluster.system.paths import ROOT

PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "tf_keras", "tensorboard", "numpy", "invoke", "rich")
OURS = ("RUNS_DIR", "DATA_DIR", "DOCKER_HOST", *settings.SECONDS, *settings.SWITCHES)
"""The variables whose values are shown; addresses and paths in them are shortened like all others."""
OTHERS = re.compile(r"TF_|KERAS_|CUDA_|NVIDIA_|NCCL_|GRPC_|XLA_|OMP_|(HTTPS?|NO|ALL)_PROXY$|PYTHON", re.IGNORECASE)
"""Variables that change how TensorFlow behaves: only their names are shown."""
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


def look() -> dict[str, str]:
    """Return the output of `invoke env --json`: facts of this machine for a bug report."""
    found = {
        "tf-cluster": checkout.revision("runs", "data") or "not a git checkout",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name))),
        "system": f"{_distribution()}, {platform.system()} {platform.release()} {platform.machine()}, "
        f"{' '.join(platform.libc_ver())}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "memory": f"{memory.total_bytes() / 2**30:.1f} GiB, {memory.available_bytes() / 2**30:.1f} GiB available",
        "limits": ", ".join(f"{name} {_limit(number)}" for name, number in _LIMITS.items()),
        "disk": _disk(folders.runs_dir()),
        "engine": engine.probe().detail,
        "gpus": _gpus(),
        "variables": ", ".join(_variables()) or "none",
        "current run": _current(),
    }
    return {name: shareable(value) for name, value in found.items()}


@plain_lines
def lines(value: dict[str, str]) -> list[str]:
    """Return it as a block that Markdown shows as it is."""
    width = max(map(len, value))
    return ["```text", *(f"{name:<{width}}  {text}" for name, text in value.items()), "```"]


def shareable(text: str) -> str:
    """Return a text without the user's name, home folder and checkout, and without passwords in addresses."""
    home = settings.home()
    for path, instead in ((ROOT, "<checkout>"), (home, "~")):
        if path and path != Path("/"):
            text = re.sub(re.escape(str(path)) + r"(?=[/\s,:;'\")]|$)", instead, text)
    text = re.sub(r"(/home/|/Users/)[^/\s,:]+", r"\1<user>", text)
    return _CREDENTIALS.sub("//<credentials>@", text)


_LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "core": resource.RLIMIT_CORE}


def _limit(number: int) -> str:
    soft, _ = resource.getrlimit(number)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "an unknown distribution"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()


def _disk(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free for {folders.runs_dir()}"


def _gpus() -> str:
    try:
        found = devices.machine("env").gpus
    except ClusterError:
        return "none that nvidia-smi reports"
    return ", ".join(f"{gpu.model} {gpu.memory_mib} MiB{' MIG' if gpu.mig else ''}" for gpu in found)


def _variables() -> list[str]:
    """Return the set variables that change what runs: of ours the values, of others only the names."""
    ours = [f"{name}={os.environ[name]}" for name in OURS if os.environ.get(name)]
    return ours + sorted(name for name in os.environ if OTHERS.match(name) and name not in OURS)


def _current() -> str:
    """Return how the current run ended, with the program's own error; a run's name may be anybody's."""
    try:
        run: RunFolder = folders.find_run()
    except (ClusterError, OSError):
        return "none"
    if (summary := run.load_summary()) is None:
        return "no summary"
    error = summary.failure and summary.failure.error
    return f"{summary.state}, {error}" if error else summary.state
