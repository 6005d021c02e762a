"""The GPU image from inside: what a container sees of the GPUs, and how fast they all-reduce a tensor.

Containers run with the same restrictions as a task. Without the image, this environment measures the bandwidth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.contract import spec
from cluster.contract.findings import Finding
from cluster.host.gpu import devices, placement
from cluster.host.gpu.devices import Machine
from cluster.host.gpu.placement import Placement
from cluster.host.image import engine, images
from cluster.host.launch import planning
from cluster.host.runtime import compose_services
from cluster.host.runtime.local_runtime import visible
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.messages import counted
from cluster.system.paths import ROOT

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - read, not written to
MIN_SHARED_BYTES = 2**30
"""What NVIDIA recommends for NCCL in containers, and what tasks' containers have (`compose_services.GPU_SHM`)."""

PROBE_TIMEOUT_S = 120.0
"""Loading cuDNN from a cold disk and initialising GPUs without persistence mode take tens of seconds."""
BUILD = "invoke image.build --accelerator gpu"
UNCONFINE = "use an engine that may lift limits: a rootless one, or one without CAP_SYS_RESOURCE, may not"
_PROBE = """
import ctypes, glob, json, os
shm = os.statvfs("/dev/shm")
report = {"devices": sorted(glob.glob("/dev/nvidia[0-9]*")), "missing": [], "shared_bytes": shm.f_frsize * shm.f_blocks}
for name in ("libcudart.so.12", "libcudnn.so.9", "libnccl.so.2"):
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        report["missing"].append(str(error))
        continue
    if name.startswith("libcudart"):
        count, version = ctypes.c_int(), ctypes.c_int()
        code = library.cudaGetDeviceCount(ctypes.byref(count))
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        library.cudaGetErrorString.restype = ctypes.c_char_p
        report["error"] = library.cudaGetErrorString(code).decode() if code else ""
        report["count"], report["cuda"] = count.value, version.value
print(json.dumps(report))
"""
"""Run in the image, without TensorFlow, which takes longer to start and reports less about the cause."""


def examine_image(able: Sequence[str], count: int) -> Finding:
    """Examine a container of the real image with GPUs, if the image is built and an engine can do that."""
    image = images.train_image("gpu")
    if not able:
        return Finding("gpu image", "warning", "not examined: no engine provides GPUs to containers", "see gpu toolkit")
    if not has_image():
        return Finding("gpu image", "warning", f"{image} is not built", BUILD)
    code, text = run_image(able[0], (), {}, "-c", _PROBE, timeout_s=PROBE_TIMEOUT_S)
    return judge_image(code, text, count)


def judge_image(code: int, text: str, count: int) -> Finding:
    """Return the finding about the output of `_PROBE` in a container that must see `count` GPUs."""
    check, last = "gpu image", text.splitlines()[-1] if text else "no output"
    if code:
        fix = UNCONFINE if "setting rlimit" in last else devices.CONFIGURE
        return Finding(check, "failed", f"no container with all GPUs starts: {last}", fix)
    try:
        report = json.loads(last)
        missing, shared = report["missing"], report["shared_bytes"]
    except (ValueError, KeyError, TypeError):
        return Finding(check, "failed", f"the container printed {last[:100]!r} instead of what it sees", BUILD)
    if missing:
        return Finding(check, "failed", f"libraries do not load: {'; '.join(missing)}", BUILD)
    seen = f"{counted(report['count'], 'GPU')} seen, devices: {', '.join(report['devices']) or 'none'}"
    if report["error"] or report["count"] < count:
        why = f"; CUDA says: {report['error']}" if report["error"] else ""
        fix = f"{devices.CONFIGURE}; with CDI renew the specification: {devices.SPECIFY}"
        return Finding(check, "failed", f"{seen}, expected {count}{why}", fix)
    if shared < MIN_SHARED_BYTES:
        return Finding(check, "failed", f"{SHARED_MEMORY} has {shared / 2**20:.0f} MiB despite --shm-size", BUILD)
    cuda = f"{report['cuda'] // 1000}.{report['cuda'] % 1000 // 10}"
    return Finding(check, "ok", f"CUDA {cuda}, cuDNN 9 and NCCL load; {seen}; {shared / 2**30:.1f} GiB shared memory")


def run_image(
    way: str, ids: Sequence[str], environment: Mapping[str, str], *words: str, timeout_s: float
) -> tuple[int, str]:
    """Run Python in the GPU image with these GPUs, or all, under a task's restrictions; return its code and output."""
    name = f"tf-cluster-doctor-{os.getpid()}"
    code, text = engine.ask(*_container(way, name, ids, environment, words), timeout_s=timeout_s)
    if code == 124:  # the client was ended, but not the container
        engine.ask("rm", "--force", name)
    return code, text


def has_image() -> bool:
    """Whether the engine has the GPU image."""
    return engine.ask("image", "inspect", "--format={{.Id}}", images.train_image("gpu"))[0] == 0


def _container(
    way: str, name: str, ids: Sequence[str], environment: Mapping[str, str], words: Sequence[str]
) -> list[str]:
    command = ["run", "--rm", "--init", "--pull=never", f"--name={name}", f"--user={compose_services.task_user()}"]
    if way == "cdi":
        command += [f"--device=nvidia.com/gpu={gpu}" for gpu in ids or ["all"]]
    else:  # the engine needs the quotes: without them the comma would begin another option
        command.append(f'--gpus="device={",".join(ids)}"' if ids else "--gpus=all")
    command += [f"--env={key}={value}" for key, value in environment.items()]
    command.append(f"--shm-size={compose_services.GPU_SHM}")
    command += [f"--ulimit={key}={value}" for key, value in compose_services.GPU_LIMITS.items()]
    command += ["--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    return [*command, "--entrypoint=python", images.train_image("gpu"), *words]


def device_requests() -> list[str]:
    """Return the values of `--gpu-runtime` that the engine supports."""
    able = []
    for way in ("reserve", "cdi", "nvidia"):
        try:
            devices.check_engine(way)
        except PrerequisiteError:
            continue
        able.append(way)
    return able


BANDWIDTH = "gpu bandwidth"
BANDWIDTH_TIMEOUT_S = 300.0
"""Importing TensorFlow, connecting NCCL and measuring 4 sizes take a minute, on idle GPUs too."""


def examine_bandwidth(gpus: str = "") -> Finding:
    """Measure the all-reduce between the GPUs that `up --workers 0 --gpus GPUS` would train on."""
    requested = placement.parse(gpus or "all", "")
    if requested is None:
        raise UsageError(f"--bandwidth with --gpus {gpus}: nothing to measure; use --gpus all, or leave it out")
    try:
        machine = devices.machine("--bandwidth", with_instances=any(name.startswith("MIG-") for name in requested.ids))
        placed = placement.place(requested, machine, spec.build(workers="0"), planning.busy())
    except ClusterError as error:  # its message has the fix
        return Finding(BANDWIDTH, "failed", str(error))
    ids = placed.of("chief")
    if len(ids) == 1:
        return Finding(BANDWIDTH, "ok", f"GPU {ids[0]} alone: nothing to all-reduce")
    try:
        code, text = _run_measurement(placed)
    except PrerequisiteError as error:
        return Finding(BANDWIDTH, "failed", f"nothing here can measure it: {error}", BUILD)
    return judge_bandwidth(code, text, machine, ids)


def judge_bandwidth(code: int, text: str, machine: Machine, ids: tuple[str, ...]) -> Finding:
    """Return the finding about the output of `train.bandwidth` on these GPUs."""
    last = text.splitlines()[-1] if text else "no output"
    fix = "see what NCCL logs with NCCL_DEBUG=INFO, and `nvidia-smi topo -m`"
    if code:
        return Finding(BANDWIDTH, "failed", f"all-reduce between GPU {','.join(ids)} fails: {last}", fix)
    try:
        # NCCL prints its warnings to the same stream.
        report = json.loads(next((line for line in reversed(text.splitlines()) if line.startswith("{")), last))
        used, measured = report["devices"], [(size["mib"], size["bus_gb_s"]) for size in report["sizes"]]
        shown = ", ".join(f"{speed:.1f} at {mib} MiB" for mib, speed in measured)
    except (ValueError, KeyError, TypeError):
        return Finding(BANDWIDTH, "failed", f"train.bandwidth printed {last[:100]!r} instead of what it measured", fix)
    if not measured or used != [f"GPU:{index}" for index in range(len(ids))]:
        return Finding(BANDWIDTH, "failed", f"it was measured on {', '.join(used)} instead of {len(ids)} GPUs", fix)
    used_links = {link for pair, link in machine.links.items() if set(pair) <= set(ids)}
    over = f" over {', '.join(sorted(used_links))}" if used_links else ""
    return Finding(BANDWIDTH, "ok", f"GPU {','.join(ids)}{over}: bus GB/s {shown}")


def _run_measurement(placed: Placement) -> tuple[int, str]:
    """Run the program in the GPU image, or in this environment without one; return its exit code and output."""
    ids = placed.of("chief")
    words = ["-m", "train.bandwidth", "--devices", str(len(ids))]
    requests = device_requests() if engine.probe().ready else []
    if requests and has_image():
        return run_image(requests[0], ids, placed.environment("chief"), *words, timeout_s=BANDWIDTH_TIMEOUT_S)
    missing = f"{images.train_image('gpu')} is not built" if requests else "no engine provides GPUs to containers"
    try:
        devices.check_environment()
    except PrerequisiteError as error:
        raise PrerequisiteError(f"{missing}, and this environment has no TensorFlow with CUDA") from error
    environment = os.environ | visible(placed, "chief")
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    try:
        done = subprocess.run([sys.executable, *words], timeout=BANDWIDTH_TIMEOUT_S, check=False, **how)
    except subprocess.TimeoutExpired:
        return 124, f"it did not end in {BANDWIDTH_TIMEOUT_S:g} s"
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()
