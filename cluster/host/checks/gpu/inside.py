"""The GPU image from inside: what a container sees of the GPUs, run with the same restrictions as a task."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from cluster.contract.findings import Finding
from cluster.host.image import engine, images
from cluster.host.runtime import compose_services, toolkit
from cluster.system.errors import PrerequisiteError
from cluster.system.messages import counted

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - read, not written to
MIN_SHARED_BYTES = 2**30
"""What NVIDIA recommends for NCCL in containers, and what tasks' containers have (`compose_services.GPU_SHM`)."""

INSIDE_TIMEOUT_S = 120.0
"""Loading cuDNN from a cold disk and initialising GPUs without persistence mode take tens of seconds."""
BUILD = "invoke image.build --accelerator gpu"
UNCONFINE = "use an engine that may lift limits: a rootless one, or one without CAP_SYS_RESOURCE, may not"
INSIDE = """
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


def look(able: Sequence[str], count: int) -> Finding:
    """Examine a container of the real image with GPUs, if the image is built and an engine can do that."""
    image = images.train_image("gpu")
    if not able:
        return Finding("gpu image", "warning", "not examined: no engine provides GPUs to containers", "see gpu toolkit")
    if not has_image():
        return Finding("gpu image", "warning", f"{image} is not built", BUILD)
    code, text = run(able[0], (), {}, "-c", INSIDE, timeout_s=INSIDE_TIMEOUT_S)
    return judge(code, text, count)


def judge(code: int, text: str, count: int) -> Finding:
    """Return the finding about the output of `INSIDE` in a container with all GPUs.

    Args:
        code: the container's exit code.
        text: what it printed, or why it printed nothing.
        count: the least number of GPUs that it must see.
    """
    check, last = "gpu image", text.splitlines()[-1] if text else "no output"
    if code:
        fix = UNCONFINE if "setting rlimit" in last else toolkit.CONFIGURE
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
        fix = f"{toolkit.CONFIGURE}; with CDI renew the specification: {toolkit.SPECIFY}"
        return Finding(check, "failed", f"{seen}, expected {count}{why}", fix)
    if shared < MIN_SHARED_BYTES:
        return Finding(check, "failed", f"{SHARED_MEMORY} has {shared / 2**20:.0f} MiB despite --shm-size", BUILD)
    cuda = f"{report['cuda'] // 1000}.{report['cuda'] % 1000 // 10}"
    return Finding(check, "ok", f"CUDA {cuda}, cuDNN 9 and NCCL load; {seen}; {shared / 2**30:.1f} GiB shared memory")


def run(way: str, ids: Sequence[str], environment: Mapping[str, str], *words: str, timeout_s: float) -> tuple[int, str]:
    """Run Python in the GPU image with these GPUs and a task's restrictions; return its exit code and output.

    Args:
        way: a value of `--gpu-runtime` that the engine supports.
        ids: the GPUs; empty for all of them.
        environment: additional variables of the container.
        words: arguments of Python.
        timeout_s: the longest that it may take.
    """
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
    if way == "cdi":
        devices = [f"--device=nvidia.com/gpu={gpu}" for gpu in ids or ["all"]]
    else:  # the engine needs the quotes: without them the comma would begin another option
        devices = [f'--gpus="device={",".join(ids)}"' if ids else "--gpus=all"]
    given = [f"--env={key}={value}" for key, value in environment.items()]
    limits = [f"--ulimit={key}={value}" for key, value in compose_services.GPU_LIMITS.items()]
    restricted = ["--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    start = ["run", "--rm", "--init", "--pull=never", f"--name={name}", f"--user={compose_services.task_user()}"]
    size = f"--shm-size={compose_services.GPU_SHM}"
    return [
        *start,
        *devices,
        *given,
        size,
        *limits,
        *restricted,
        "--entrypoint=python",
        images.train_image("gpu"),
        *words,
    ]


def ways() -> list[str]:
    """Return the values of `--gpu-runtime` that the engine supports."""
    able = []
    for way in ("reserve", "cdi", "nvidia"):
        try:
            toolkit.check_engine(way)
        except PrerequisiteError:
            continue
        able.append(way)
    return able
