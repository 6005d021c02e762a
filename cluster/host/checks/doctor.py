"""Checks of prerequisites, each with its fix, including GPUs: the driver, the memory, and their use in containers."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.host import nvidia
from cluster.host.image import engine, images, locks
from cluster.host.launch import folders
from cluster.host.runtime import compose_runtime, registry, tensorboard
from cluster.host.runtime.base import Finding
from cluster.system import processes
from cluster.system.errors import PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND, short_path

_HAS_CUDA = any(importlib.metadata.distributions(name="tensorflow"))  # `tensorflow-cpu` is another distribution
LOCKS = ("host", "train-gpu" if _HAS_CUDA else "train-cpu", "tensorboard")
# CUDA Toolkit Release Notes, "CUDA Toolkit and Corresponding Driver Versions"
# (docs.nvidia.com/cuda/archive/12.5.1/cuda-toolkit-release-notes). TensorFlow 2.21 is compiled with CUDA 12.5; the
# newer 12.x libraries in train-gpu.lock run on its driver by the same minor-version compatibility.
MIN_DRIVER = "525.60.13"
"""The oldest driver for CUDA 12.x, by minor-version compatibility, without the features that 12.5 added."""
FULL_DRIVER = "555.42.02"
"""The oldest driver for all features of CUDA 12.5."""
OLDEST_KERNELS, NEWEST_KERNELS = "6.0", "9.0"
"""The compute capabilities with kernels in TensorFlow's wheels: sm_60 to sm_89 and compute_90 (its .bazelrc)."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - read, not written to
MIN_SHARED_BYTES = 2**30
"""NVIDIA's recommendation for NCCL, and the size in tasks' containers (`compose_runtime.GPU_SHM`)."""
FIELDS = "driver_version,name,mig.mode.current,ecc.errors.uncorrected.volatile.total,compute_cap"
QUERY = (f"--query-gpu={FIELDS}", "--format=csv,noheader")
PROBE_TIMEOUT_S = 120.0
"""Loading cuDNN from a cold disk and initialising GPUs without persistence mode take tens of seconds."""
BUILD = f"{COMMAND} image.build --accelerator gpu"
PROBE = ROOT / "docker" / "see_gpus.py"


def examine_machine(port: int = tensorboard.PORT) -> list[Finding]:
    """Return the findings about this machine. Changes nothing; only `examine_gpus` starts a container."""
    findings = [_python(), _packages(), _processor(), _disk(), _data(), _port(port)]
    of_runtimes = [finding for runtime in registry.RUNTIMES.values() for finding in runtime.examine()]
    return [*findings, *of_runtimes, *examine_gpus()]


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
    if ready := sorted(path.parent.name for path in folders.data_dir().glob("arrays/*/arrays.json")):
        return Finding("data", "ok", ", ".join(ready))
    detail = f"nothing is prepared in {short_path(folders.data_dir())}"
    return Finding("data", "warning", detail, f"{COMMAND} data.prepare")


def _port(port: int) -> Finding:
    if problem := tensorboard.port_problem(folders.runs_dir(), port):
        return Finding("tensorboard port", "warning", problem, "nothing to do: TensorBoard takes a free port")
    return Finding("tensorboard port", "ok", f"127.0.0.1:{port} is free or ours")


def examine_gpus() -> list[Finding]:
    """Return the findings about GPUs. Changes nothing; one container examines itself and is removed."""
    if shutil.which("nvidia-smi") is None:
        return [Finding("gpus", "ok", "none: no nvidia-smi on this machine")]
    code, text = nvidia.ask_nvidia_smi(*QUERY)
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if code or not rows or any(len(row) != 5 for row in rows):
        why = (text.strip() or "it lists no GPU").splitlines()[-1]
        fix = "run `nvidia-smi`, reload or install NVIDIA's driver; until then --gpus none"
        return [Finding("gpus", "warning", f"nvidia-smi reports none: {why}", fix)]
    # With MIG, a process sees only a single instance, whatever the number of GPUs.
    split = any(mig == "Enabled" for _, _, mig, *_ in rows)
    findings = [_models(rows), judge_driver(rows[0][0]), judge_capabilities(row[-1] for row in rows)]
    findings += [_memory_errors(rows), judge_shared_memory(_shared_bytes())]
    return findings + _containers(1 if split else len(rows))


def _models(rows: list[list[str]]) -> Finding:
    counts = Counter(name for _, name, *_ in rows)
    detail = ", ".join(f"{count} {name}" for name, count in counts.items())
    if len(counts) > 1:
        return Finding("gpus", "warning", detail, "name GPUs of one model by --gpus: every step waits for the slowest")
    return Finding("gpus", "ok", detail)


def judge_driver(version: str) -> Finding:
    """Report whether the driver is new enough for the image's CUDA."""
    if _numbers(version) < _numbers(MIN_DRIVER):
        return Finding("gpu driver", "failed", f"{version}: CUDA 12 needs {MIN_DRIVER}", "install a newer driver")
    if _numbers(version) < _numbers(FULL_DRIVER):
        detail = f"{version}: CUDA 12.5 runs by minor-version compatibility, without what is new in it"
        return Finding("gpu driver", "warning", detail, f"install driver {FULL_DRIVER} or newer")
    return Finding("gpu driver", "ok", f"{version}: all of CUDA 12.5")


def judge_capabilities(found: Iterable[str]) -> Finding:
    """Report whether TensorFlow's wheels have kernels for GPUs of these compute capabilities, such as 12.0."""
    known = sorted({each for each in found if _numbers(each)}, key=_numbers) or ["unknown"]
    detail, fix = f"compute capability {', '.join(known)}", "use a TensorFlow built for them, or --gpus none"
    if _numbers(known[-1]) > _numbers(NEWEST_KERNELS):  # tensorflow issues 97387 and 111958
        detail += ": TensorFlow has no kernels for it, compiles them at the first use, and XLA may fail"
        return Finding("gpu kernels", "warning", detail, fix)
    if known != ["unknown"] and _numbers(known[0]) < _numbers(OLDEST_KERNELS):
        return Finding("gpu kernels", "failed", f"{detail}: TensorFlow needs {OLDEST_KERNELS}", fix)
    return Finding("gpu kernels", "ok", detail)


def _memory_errors(rows: list[list[str]]) -> Finding:
    bad = [str(index) for index, (*_, errors, _) in enumerate(rows) if errors.isdigit() and int(errors) > 0]
    if bad:
        detail = f"GPU {','.join(bad)} had uncorrected memory errors since the driver was loaded"
        return Finding("gpu memory", "failed", detail, "restart the machine; if they come back, have the GPU replaced")
    return Finding("gpu memory", "ok", "no uncorrected error reported")


def judge_shared_memory(size: int) -> Finding:
    """Report whether local processes have the shared memory that NCCL needs; containers have their own."""
    if size < MIN_SHARED_BYTES:
        detail = f"{SHARED_MEMORY} has {size / 2**20:.0f} MiB: NCCL between local processes needs 1 GiB"
        return Finding("shared memory", "warning", detail, f"sudo mount -o remount,size=1g {SHARED_MEMORY}")
    return Finding("shared memory", "ok", f"{SHARED_MEMORY} has {size / 2**30:.1f} GiB")


def _shared_bytes() -> int:
    return shutil.disk_usage(SHARED_MEMORY).total if Path(SHARED_MEMORY).is_dir() else 0


def _containers(count: int) -> list[Finding]:
    """Return the findings about GPUs in containers, from one of the real image that must see `count`."""
    if not engine.probe().ready:
        return []  # the runtime has a finding for that
    try:
        nvidia.check_engine()
    except PrerequisiteError as error:
        return [Finding("gpu image", "failed", str(error))]
    image = images.train_image("gpu")
    if engine.ask("image", "inspect", "--format={{.Id}}", image)[0]:
        return [Finding("gpu image", "warning", f"{image} is not built", BUILD)]
    name = f"tf-cluster-doctor-{os.getpid()}"
    # With the restrictions of a task.
    command = ["run", "--rm", "--init", "--pull=never", f"--name={name}", f"--user={compose_runtime.task_user()}"]
    command += ["--gpus=all", f"--shm-size={compose_runtime.GPU_SHM}", "--network=none", "--read-only"]
    command += [f"--ulimit={key}={value}" for key, value in compose_runtime.GPU_LIMITS.items()]
    command += ["--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    code, text = engine.ask(*command, "--entrypoint=python", image, "-c", PROBE.read_text(), timeout_s=PROBE_TIMEOUT_S)
    if code == processes.TIMED_OUT:  # only the client was ended, not the container
        engine.ask("rm", "--force", name)
    return [judge_image(code, text, count)]


def judge_image(code: int, text: str, count: int) -> Finding:
    """Return the finding about the output of `PROBE` in a container that must see `count` GPUs."""
    last = text.splitlines()[-1] if text else "no output"
    if code:
        return Finding("gpu image", "failed", f"a container with all GPUs fails: {last}", nvidia.CONFIGURE)
    try:
        report = json.loads(last)
        seen, error = int(report["count"]), report["error"]
    except (ValueError, KeyError, TypeError):
        return Finding("gpu image", "failed", f"the container printed {last[:100]!r} instead of what it sees", BUILD)
    if error or seen < count:
        why = f"; CUDA reports: {error}" if error else ""
        return Finding("gpu image", "failed", f"{seen} GPUs seen, expected {count}{why}", nvidia.CONFIGURE)
    return Finding("gpu image", "ok", f"CUDA, cuDNN and NCCL load; GPUs seen: {seen}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
