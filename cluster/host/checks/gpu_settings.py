"""Findings of `doctor` on a machine with GPUs: their driver and settings, and NVIDIA's container toolkit."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cluster.contract.findings import Finding
from cluster.host.checks import gpu_image
from cluster.host.checks.gpu_image import MIN_SHARED_BYTES, SHARED_MEMORY
from cluster.host.gpu import devices
from cluster.host.image import engine
from cluster.system import processes

# CUDA Toolkit Release Notes, "CUDA Toolkit and Corresponding Driver Versions"
# (docs.nvidia.com/cuda/archive/12.5.1/cuda-toolkit-release-notes). TensorFlow 2.21 is compiled with CUDA 12.5; the
# newer 12.x libraries in train-gpu.lock run on its driver by the same minor-version compatibility.
MIN_DRIVER = "525.60.13"
"""For CUDA 12.x by minor-version compatibility: it runs, but what 12.5 added is missing."""
WHOLE_DRIVER = "555.42.02"
"""For all of CUDA 12.5."""

ALIKE = {
    "clocks.max.sm": "highest clock",
    "clocks.applications.graphics": "application clock",
    "power.limit": "power limit",
}
"""Settings that should not differ between GPUs of one model: a synchronous step takes as long as the slowest."""
ERRORS = "ecc.errors.uncorrected.volatile.total"
FIELDS = ("index", "name", "driver_version", "mig.mode.current", "persistence_mode", "ecc.mode.current", ERRORS, *ALIKE)
_UNKNOWN = re.compile(r'Field "([^"]+)" is not a valid field to query')

Settings = Sequence[Mapping[str, str]]
"""The settings of each GPU as `nvidia-smi` reports them, by the names of its fields."""


def examine() -> list[Finding]:
    """Return the findings about GPUs. Nothing is changed; one container examines itself and is removed."""
    if shutil.which("nvidia-smi") is None:
        return [Finding("gpus", "ok", "none: no nvidia-smi on this machine")]
    code, text = query()
    gpus = settings(text) if code == 0 else []
    if not gpus:
        why = text.splitlines()[-1].strip() if text else "it lists no GPU"
        fix = "run `nvidia-smi`, reload or install NVIDIA's driver; until then --gpus none"
        return [Finding("gpus", "warning", f"nvidia-smi reports none: {why}", fix)]
    # A process sees a single instance of a GPU that is split into instances, not as many GPUs as there are.
    split = any(_value(gpu, "mig.mode.current") == "Enabled" for gpu in gpus)
    able = gpu_image.device_requests() if engine.probe().ready else None
    return [
        models(gpus),
        driver(gpus),
        *(check(gpus) for check in (persistence, mig, memory_errors, clocks)),
        shared_memory(_shared_bytes()),
        container_toolkit(_toolkit_version(), able),
        gpu_image.examine_image(able or [], 1 if split else len(gpus)),
    ]


def query() -> tuple[int, str]:
    """Return the exit code of `nvidia-smi --query-gpu` and what it printed, with a header.

    Drivers drop and rename fields, and refuse the whole query for an unknown one, which is then left out.
    """
    fields = list(FIELDS)
    while True:
        code, text = devices.ask(f"--query-gpu={','.join(fields)}", "--format=csv,nounits")
        unknown = _UNKNOWN.search(text) if code else None
        if not unknown or unknown[1] not in fields:
            return code, text
        fields.remove(unknown[1])


def settings(text: str) -> Settings:
    """Parse the output of `nvidia-smi --query-gpu`, without the units in its header; empty unless it is a table."""
    head, *lines = [line for line in text.splitlines() if line.strip()] or [""]
    names = [name.split("[")[0].strip() for name in head.split(",")]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if any(len(row) != len(names) for row in rows):
        return []  # one line about an error must not hide that a GPU is missing
    return [dict(zip(names, row, strict=True)) for row in rows]


def models(gpus: Settings) -> Finding:
    """Report which GPUs there are, and whether all are of one model."""
    counts = Counter(_value(gpu, "name") for gpu in gpus)
    detail = ", ".join(f"{count} {name}" for name, count in counts.items())
    if len(counts) == 1:
        return Finding("gpus", "ok", detail)
    alike = [_value(gpu, "index") for gpu in gpus if _value(gpu, "name") == counts.most_common(1)[0][0]]
    fix = f"use GPUs of one model, every step waits for the slowest: --gpus {','.join(alike)}"
    return Finding("gpus", "warning", detail, fix + ("," if len(alike) == 1 else ""))


def driver(gpus: Settings) -> Finding:
    """Report whether the driver is new enough for the image's CUDA."""
    version = _value(gpus[0], "driver_version")
    if _numbers(version) < _numbers(MIN_DRIVER):
        found = version or "unknown version"
        return Finding("gpu driver", "failed", f"{found}: CUDA 12 needs {MIN_DRIVER}", "install a newer driver")
    if _numbers(version) < _numbers(WHOLE_DRIVER):
        detail = f"{version}: CUDA 12.5 runs by minor-version compatibility, without what is new in it"
        return Finding("gpu driver", "warning", detail, f"install driver {WHOLE_DRIVER} or newer")
    return Finding("gpu driver", "ok", f"{version}: all of CUDA 12.5")


def persistence(gpus: Settings) -> Finding:
    """Report whether the driver keeps idle GPUs initialised."""
    if off := _where(gpus, "persistence_mode", lambda mode: mode == "Disabled"):
        detail = f"off on GPU {off}: every start waits until it is initialised, and its clock settings are lost"
        return Finding("gpu persistence", "warning", detail, "sudo nvidia-smi -pm 1, or start nvidia-persistenced")
    return Finding("gpu persistence", "ok", _common(gpus, "persistence_mode", "on", {"Enabled"}))


def mig(gpus: Settings) -> Finding:
    """Report which GPUs are split into MIG instances."""
    if on := _where(gpus, "mig.mode.current", lambda mode: mode == "Enabled"):
        detail = f"GPU {on} is split into instances: --gpus N skips it, and NCCL connects no instances"
        return Finding("gpu mig", "warning", detail, f"for whole GPUs: sudo nvidia-smi -i {on} -mig 0")
    return Finding("gpu mig", "ok", "no GPU is split into instances")


def memory_errors(gpus: Settings) -> Finding:
    """Report errors in the GPUs' memory, and GPUs without ECC next to others that have it."""
    check = "gpu ecc"
    if bad := _where(gpus, ERRORS, lambda number: number.isdigit() and int(number) > 0):
        fix = "restart the machine; if they come back, have the GPU replaced"
        return Finding(check, "failed", f"GPU {bad} had uncorrected memory errors since the driver was loaded", fix)
    modes = {_value(gpu, "ecc.mode.current") for gpu in gpus}
    if "Disabled" in modes:
        off = _where(gpus, "ecc.mode.current", lambda mode: mode == "Disabled")
        detail = f"off on GPU {off}: memory errors go unnoticed"
        return Finding(check, "warning", detail, "sudo nvidia-smi -e 1, then restart it")
    return Finding(check, "ok", _common(gpus, "ecc.mode.current", "on, no uncorrected error", {"Enabled"}))


def clocks(gpus: Settings) -> Finding:
    """Report whether GPUs of one model have the same clocks and power limits."""
    uneven = []
    for model in dict.fromkeys(_value(gpu, "name") for gpu in gpus):
        same = [gpu for gpu in gpus if _value(gpu, "name") == model]
        for setting, words in ALIKE.items():
            values: dict[str, list[str]] = {}
            for gpu in same:
                values.setdefault(_value(gpu, setting), []).append(_value(gpu, "index"))
            if len(values) > 1:
                groups = ", ".join(f"{value or 'unknown'} on GPU {','.join(ids)}" for value, ids in values.items())
                uneven.append(f"{words} {groups}")
    if uneven:
        detail = f"{'; '.join(uneven)}: every step waits for the slowest"
        return Finding("gpu clocks", "warning", detail, "sudo nvidia-smi -rac; sudo nvidia-smi -pl WATTS")
    first = [f"{words} {_value(gpus[0], setting)}" for setting, words in ALIKE.items() if _value(gpus[0], setting)]
    return Finding("gpu clocks", "ok", f"the same on GPUs of one model ({', '.join(first) or 'none reported'})")


def shared_memory(size: int) -> Finding:
    """Report whether local processes have the shared memory that NCCL needs; containers have their own."""
    if size < MIN_SHARED_BYTES:
        detail = f"{SHARED_MEMORY} has {size / 2**20:.0f} MiB: NCCL between local processes needs 1 GiB"
        return Finding("shared memory", "warning", detail, f"sudo mount -o remount,size=1g {SHARED_MEMORY}")
    return Finding("shared memory", "ok", f"{SHARED_MEMORY} has {size / 2**30:.1f} GiB")


def container_toolkit(version: str, able: list[str] | None) -> Finding:
    """Report whether NVIDIA's container toolkit is installed and the engine uses it.

    Args:
        version: the toolkit's; empty where it is not installed.
        able: values of `--gpu-runtime` that the engine supports; None if no engine answers.
    """
    check, found = "gpu toolkit", f"NVIDIA's container toolkit {version}" if version else "no nvidia-ctk on the PATH"
    if able is None:
        return Finding(check, "warning", f"{found}, and no engine that could use it", "install Docker Engine")
    if able:
        return Finding(check, "ok", f"{found}; the engine supports --gpu-runtime {', '.join(able)}")
    fix = devices.CONFIGURE if version else f"install NVIDIA's container toolkit, then {devices.CONFIGURE}"
    return Finding(check, "failed", f"{found}; the engine has neither its runtime nor its CDI devices", fix)


def _toolkit_version() -> str:
    code, printed, _ = processes.run(["nvidia-ctk", "--version"], devices.ANSWER_TIMEOUT_S)
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


def _value(gpu: Mapping[str, str], setting: str) -> str:
    """Return a setting; empty if the GPU has none (`[N/A]`, `[Not Supported]`) or the driver does not report it."""
    value = gpu.get(setting, "")
    return "" if value.startswith("[") or value == "N/A" else value


def _where(gpus: Settings, setting: str, holds: Callable[[str], bool]) -> str:
    """Return the indices of the GPUs whose setting satisfies a predicate, separated by commas."""
    return ",".join(_value(gpu, "index") for gpu in gpus if holds(_value(gpu, setting)))


def _common(gpus: Settings, setting: str, words: str, values: set[str]) -> str:
    """Return the words if a GPU reports one of these values, and otherwise that none does."""
    return words if any(_value(gpu, setting) in values for gpu in gpus) else "not reported by these GPUs"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
