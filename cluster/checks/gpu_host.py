"""What the doctor finds on a machine with GPUs: driver, settings, toolkit, and a look from inside the real image."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cluster.errors import PrerequisiteError
from cluster.findings import Finding
from cluster.gpu import devices as gpus
from cluster.image import engine, images
from cluster.messages import counted
from cluster.runtime import toolkit
from cluster.runtime.compose import overlay
from cluster.system import processes

# CUDA Toolkit Release Notes, "CUDA Toolkit and Corresponding Driver Versions"
# (docs.nvidia.com/cuda/archive/12.5.1/cuda-toolkit-release-notes). TensorFlow 2.21 is compiled with CUDA 12.5; the
# newer 12.x libraries in train-gpu.lock run on its driver by the same minor-version compatibility.
MIN_DRIVER = "525.60.13"
"""For CUDA 12.x by minor-version compatibility: it runs, but what 12.5 added is missing."""
WHOLE_DRIVER = "555.42.02"
"""For all of CUDA 12.5."""

FIELDS = (
    "index",
    "name",
    "driver_version",
    "mig.mode.current",
    "persistence_mode",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "clocks.max.sm",
    "clocks.applications.graphics",
    "power.limit",
)
ALIKE = {
    "clocks.max.sm": "highest clock",
    "clocks.applications.graphics": "application clock",
    "power.limit": "power limit",
}
"""What must not differ between GPUs of one model: in a synchronous step all wait for the slowest."""
_UNKNOWN = re.compile(r'Field "([^"]+)" is not a valid field to query')

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
MIN_SHARED_BYTES = 2**30
"""As NVIDIA advises for NCCL in containers, and as the tasks' containers have (`overlay.GPU_SHM`)."""

INSIDE_TIMEOUT_S = 120.0
"""Loading cuDNN from a cold disk and waking GPUs without persistence mode take tens of seconds."""
BUILD = "invoke image.build --accelerator gpu"
UNCONFINE = "use an engine that may lift limits: a rootless one, or one without CAP_SYS_RESOURCE, may not"
INSIDE = """
import ctypes, glob, json, os
shm = os.statvfs("/dev/shm")
told = {"devices": sorted(glob.glob("/dev/nvidia[0-9]*")), "missing": [], "shared_bytes": shm.f_frsize * shm.f_blocks}
for name in ("libcudart.so.12", "libcudnn.so.9", "libnccl.so.2"):
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        told["missing"].append(str(error))
        continue
    if name.startswith("libcudart"):
        count, version = ctypes.c_int(), ctypes.c_int()
        code = library.cudaGetDeviceCount(ctypes.byref(count))
        library.cudaRuntimeGetVersion(ctypes.byref(version))
        library.cudaGetErrorString.restype = ctypes.c_char_p
        told["error"] = library.cudaGetErrorString(code).decode() if code else ""
        told["count"], told["cuda"] = count.value, version.value
print(json.dumps(told))
"""
"""Run in the image, without TensorFlow, which takes longer and tells less of what is wrong."""

Settings = Sequence[Mapping[str, str]]
"""A GPU each: what `nvidia-smi` tells of it by its fields' names. What it does not tell is left out."""


def examine() -> list[Finding]:
    """Return what this machine has and lacks for GPUs. Changes nothing; starts one container, which looks and goes."""
    if shutil.which("nvidia-smi") is None:
        return [Finding("gpus", "ok", "none: no nvidia-smi on this machine")]
    code, text = query()
    told = settings(text) if code == 0 else []
    if not told:
        why = text.splitlines()[-1].strip() if text else "it lists no GPU"
        fix = "run `nvidia-smi`, reload or install NVIDIA's driver; until then --gpus none"
        return [Finding("gpus", "warning", f"nvidia-smi tells of none: {why}", fix)]
    # Where one is cut into instances, a process sees one instance, and not as many GPUs as there are.
    cut = any(_told(gpu, "mig.mode.current") == "Enabled" for gpu in told)
    able = ways() if engine.probe().ready else None
    return [
        models(told),
        driver(told),
        *(check(told) for check in (persistence, mig, memory_errors, clocks)),
        shared_memory(_shared_bytes()),
        device_requests(_toolkit_version(), able),
        _inside(able or [], 1 if cut else len(told)),
    ]


def query() -> tuple[int, str]:
    """Return the exit code of `nvidia-smi --query-gpu` and what it printed, with a header.

    Drivers drop fields and rename them, and then answer for none; so what one does not know is asked no more.
    """
    fields = list(FIELDS)
    while True:
        code, text = gpus.ask(f"--query-gpu={','.join(fields)}", "--format=csv,nounits")
        unknown = _UNKNOWN.search(text) if code else None
        if not unknown or unknown[1] not in fields:
            return code, text
        fields.remove(unknown[1])


def settings(text: str) -> Settings:
    """Return what `nvidia-smi --query-gpu` printed, without the units in its header; nothing of what is no table."""
    head, *lines = [line for line in text.splitlines() if line.strip()] or [""]
    names = [name.split("[")[0].strip() for name in head.split(",")]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if any(len(row) != len(names) for row in rows):
        return []  # a complaint about one GPU must not make the others look like all
    return [dict(zip(names, row, strict=True)) for row in rows]


def models(told: Settings) -> Finding:
    """Tell which GPUs there are, and whether they are of one model."""
    counts = Counter(_told(gpu, "name") for gpu in told)
    detail = ", ".join(f"{count} {name}" for name, count in counts.items())
    if len(counts) == 1:
        return Finding("gpus", "ok", detail)
    alike = [_told(gpu, "index") for gpu in told if _told(gpu, "name") == counts.most_common(1)[0][0]]
    fix = f"name those of one model, every step waits for the slowest: --gpus {','.join(alike)}"
    return Finding("gpus", "warning", detail, fix + ("," if len(alike) == 1 else ""))


def driver(told: Settings) -> Finding:
    """Tell whether the driver is new enough for the image's CUDA."""
    version = _told(told[0], "driver_version")
    if _numbers(version) < _numbers(MIN_DRIVER):
        found = version or "unknown version"
        return Finding("gpu driver", "failed", f"{found}: CUDA 12 needs {MIN_DRIVER}", "install a newer driver")
    if _numbers(version) < _numbers(WHOLE_DRIVER):
        detail = f"{version}: CUDA 12.5 runs by minor-version compatibility, without what is new in it"
        return Finding("gpu driver", "warning", detail, f"install driver {WHOLE_DRIVER} or newer")
    return Finding("gpu driver", "ok", f"{version}: all of CUDA 12.5")


def persistence(told: Settings) -> Finding:
    """Tell whether the driver keeps GPUs awake that nobody uses."""
    if off := _where(told, "persistence_mode", lambda mode: mode == "Disabled"):
        detail = f"off on GPU {off}: every start waits for it to wake, and its clocks are forgotten"
        return Finding("gpu persistence", "warning", detail, "sudo nvidia-smi -pm 1, or start nvidia-persistenced")
    return Finding("gpu persistence", "ok", _common(told, "persistence_mode", "on", {"Enabled"}))


def mig(told: Settings) -> Finding:
    """Tell which GPUs are cut into instances."""
    if on := _where(told, "mig.mode.current", lambda mode: mode == "Enabled"):
        detail = f"GPU {on} is cut into instances: --gpus N passes it over, NCCL connects none"
        return Finding("gpu mig", "warning", detail, f"for whole GPUs: sudo nvidia-smi -i {on} -mig 0")
    return Finding("gpu mig", "ok", "no GPU is cut into instances")


def memory_errors(told: Settings) -> Finding:
    """Tell of errors in the GPUs' memory, and of memory that does not look for them where another GPU's does."""
    check = "gpu ecc"
    counter = "ecc.errors.uncorrected.volatile.total"
    if bad := _where(told, counter, lambda number: number.isdigit() and int(number) > 0):
        fix = "restart the machine; if they come back, have the GPU replaced"
        return Finding(check, "failed", f"GPU {bad} had uncorrected memory errors since the driver was loaded", fix)
    modes = {_told(gpu, "ecc.mode.current") for gpu in told}
    if "Disabled" in modes:
        off = _where(told, "ecc.mode.current", lambda mode: mode == "Disabled")
        return Finding(
            check, "warning", f"off on GPU {off}: a flipped bit is not noticed", "sudo nvidia-smi -e 1, then restart it"
        )
    return Finding(check, "ok", _common(told, "ecc.mode.current", "on, no uncorrected error", {"Enabled"}))


def clocks(told: Settings) -> Finding:
    """Tell whether GPUs of one model have the same clocks and power limits."""
    uneven = []
    for model in dict.fromkeys(_told(gpu, "name") for gpu in told):
        same = [gpu for gpu in told if _told(gpu, "name") == model]
        for setting, words in ALIKE.items():
            values: dict[str, list[str]] = {}
            for gpu in same:
                values.setdefault(_told(gpu, setting), []).append(_told(gpu, "index"))
            if len(values) > 1:
                groups = ", ".join(f"{value or 'unknown'} on GPU {','.join(ids)}" for value, ids in values.items())
                uneven.append(f"{words} {groups}")
    if uneven:
        detail = f"{'; '.join(uneven)}: every step waits for the slowest"
        return Finding("gpu clocks", "warning", detail, "sudo nvidia-smi -rac; sudo nvidia-smi -pl WATTS")
    first = [f"{words} {_told(told[0], setting)}" for setting, words in ALIKE.items() if _told(told[0], setting)]
    return Finding("gpu clocks", "ok", f"alike on GPUs of one model ({', '.join(first) or 'none told'})")


def shared_memory(size: int) -> Finding:
    """Tell whether local processes have the shared memory that NCCL wants; containers have their own."""
    if size < MIN_SHARED_BYTES:
        detail = f"{SHARED_MEMORY} has {size / 2**20:.0f} MiB: NCCL between local processes wants 1 GiB"
        return Finding("shared memory", "warning", detail, f"sudo mount -o remount,size=1g {SHARED_MEMORY}")
    return Finding("shared memory", "ok", f"{SHARED_MEMORY} has {size / 2**30:.1f} GiB")


def device_requests(version: str, able: list[str] | None) -> Finding:
    """Tell whether NVIDIA's container toolkit is there and the engine knows it.

    Args:
        version: the toolkit's; empty where it is not installed.
        able: values of `--gpu-runtime` that the engine can do; None where no engine answers.
    """
    check, found = "gpu toolkit", f"NVIDIA's container toolkit {version}" if version else "no nvidia-ctk on the PATH"
    if able is None:
        return Finding(check, "warning", f"{found}, and no engine to hand over GPUs", "install Docker Engine")
    if able:
        return Finding(check, "ok", f"{found}; the engine can do --gpu-runtime {', '.join(able)}")
    fix = toolkit.CONFIGURE if version else f"install NVIDIA's container toolkit, then {toolkit.CONFIGURE}"
    return Finding(check, "failed", f"{found}; the engine has neither its runtime nor its CDI devices", fix)


def inside(code: int, text: str, count: int) -> Finding:
    """Judge what `INSIDE` told from a container that was given all GPUs.

    Args:
        code: the container's exit code.
        text: what it printed, or why there is nothing.
        count: how many GPUs it must see at least.
    """
    check, last = "gpu image", text.splitlines()[-1] if text else "no output"
    if code:
        fix = UNCONFINE if "setting rlimit" in last else toolkit.CONFIGURE
        return Finding(check, "failed", f"no container with all GPUs starts: {last}", fix)
    try:
        told = json.loads(last)
        missing, shared = told["missing"], told["shared_bytes"]
    except (ValueError, KeyError, TypeError):
        return Finding(check, "failed", f"the container printed {last[:100]!r} instead of what it sees", BUILD)
    if missing:
        return Finding(check, "failed", f"libraries do not load: {'; '.join(missing)}", BUILD)
    seen = f"{counted(told['count'], 'GPU')} seen, devices: {', '.join(told['devices']) or 'none'}"
    if told["error"] or told["count"] < count:
        why = f"; CUDA says: {told['error']}" if told["error"] else ""
        fix = f"{toolkit.CONFIGURE}; with CDI renew the specification: {toolkit.SPECIFY}"
        return Finding(check, "failed", f"{seen}, expected {count}{why}", fix)
    if shared < MIN_SHARED_BYTES:
        return Finding(check, "failed", f"{SHARED_MEMORY} has {shared / 2**20:.0f} MiB despite --shm-size", BUILD)
    cuda = f"{told['cuda'] // 1000}.{told['cuda'] % 1000 // 10}"
    return Finding(check, "ok", f"CUDA {cuda}, cuDNN 9 and NCCL load; {seen}; {shared / 2**30:.1f} GiB shared memory")


def run(way: str, ids: Sequence[str], environment: Mapping[str, str], *words: str, timeout_s: float) -> tuple[int, str]:
    """Run Python in the GPU image with these GPUs, as shut in as a task is; return its exit code and output.

    Args:
        way: a value of `--gpu-runtime` that the engine can do.
        ids: the GPUs; none for all of them.
        environment: what the container gets besides.
        words: for Python.
        timeout_s: its bound.
    """
    name = f"tf-cluster-doctor-{os.getpid()}"
    code, text = engine.ask(*_container(way, name, ids, environment, words), timeout_s=timeout_s)
    if code == 124:  # it was the client that was ended: the container would go on
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
    else:  # the quotes are the engine's: without them the comma would begin another option
        devices = [f'--gpus="device={",".join(ids)}"' if ids else "--gpus=all"]
    given = [f"--env={key}={value}" for key, value in environment.items()]
    limits = [f"--ulimit={key}={value}" for key, value in overlay.GPU_LIMITS.items()]
    shut_in = ["--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    start = ["run", "--rm", "--init", "--pull=never", f"--name={name}", f"--user={overlay.task_user()}"]
    size = f"--shm-size={overlay.GPU_SHM}"
    return [*start, *devices, *given, size, *limits, *shut_in, "--entrypoint=python", images.train_image("gpu"), *words]


def _inside(able: Sequence[str], count: int) -> Finding:
    """Look from inside a container of the real image, if there is one and it can be given GPUs."""
    image = images.train_image("gpu")
    if not able:
        return Finding("gpu image", "warning", "not looked at: no engine hands over GPUs", "see gpu toolkit")
    if not has_image():
        return Finding("gpu image", "warning", f"{image} is not built", BUILD)
    code, text = run(able[0], (), {}, "-c", INSIDE, timeout_s=INSIDE_TIMEOUT_S)
    return inside(code, text, count)


def ways() -> list[str]:
    """Return the values of `--gpu-runtime` that the engine can do."""
    able = []
    for way in ("reserve", "cdi", "nvidia"):
        try:
            toolkit.check_engine(way)
        except PrerequisiteError:
            continue
        able.append(way)
    return able


def _toolkit_version() -> str:
    """Return the version of NVIDIA's container toolkit; empty where it is not installed."""
    code, printed, _ = processes.run(["nvidia-ctk", "--version"], gpus.ANSWER_TIMEOUT_S)
    if code in (124, 126, 127):
        return ""
    match = re.search(r"version (\S+)", printed)
    return match[1] if match else "of unknown version"


def _shared_bytes() -> int:
    try:
        held = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return held.f_frsize * held.f_blocks


def _told(gpu: Mapping[str, str], setting: str) -> str:
    """Return a setting; empty where the GPU has none (`[N/A]`, `[Not Supported]`) or the driver does not tell."""
    value = gpu.get(setting, "")
    return "" if value.startswith("[") or value == "N/A" else value


def _where(told: Settings, setting: str, holds: Callable[[str], bool]) -> str:
    """Return the indices of the GPUs for whose setting this holds, with commas."""
    return ",".join(_told(gpu, "index") for gpu in told if holds(_told(gpu, setting)))


def _common(told: Settings, setting: str, words: str, values: set[str]) -> str:
    """Return the words where a GPU tells one of these values, and otherwise that none tells."""
    return words if any(_told(gpu, setting) in values for gpu in told) else "not told by these GPUs"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
