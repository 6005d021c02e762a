"""What tasks need to use GPUs: NVIDIA's container toolkit in containers, a TensorFlow with CUDA in processes."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from cluster.host.image import engine
from cluster.system.errors import PrerequisiteError

HOOK = "nvidia-container-runtime-hook"
CONFIGURE = "`nvidia-ctk runtime configure --runtime=docker` and restart the engine"
ENABLE = '`"features": {"cdi": true}`'
SPECIFY = "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"


def check_engine(way: str) -> None:
    """Check that the engine can hand GPUs to containers in this way (a value of `--gpu-runtime`).

    Raises:
        PrerequisiteError: it cannot.
    """
    code, text = engine.ask("info", "--format", "{{json .}}")
    info: dict[str, Any] = json.loads(text) if code == 0 and text.startswith("{") else {}
    has_runtime = "nvidia" in (info.get("Runtimes") or {})
    if way == "cdi":
        if not _specified(info):
            raise PrerequisiteError(
                "--gpu-runtime cdi: the engine knows no CDI device of NVIDIA's; install NVIDIA's container toolkit, "
                f"run {SPECIFY}, have CDI on in the engine: before Docker Engine 28.2 by {ENABLE} in its daemon.json"
            )
    elif not has_runtime and not (way == "reserve" and shutil.which(HOOK)):
        raise PrerequisiteError(
            f"--gpu-runtime {way}: the engine has no NVIDIA runtime, so containers get no GPU; install NVIDIA's "
            f"container toolkit, then {CONFIGURE}"
        )


def _specified(info: dict[str, Any]) -> bool:
    """Whether the engine finds a CDI specification of NVIDIA's devices."""
    if any("nvidia.com/gpu" in str(device.get("ID")) for device in info.get("DiscoveredDevices") or []):
        return True
    folders = [Path(folder) for folder in info.get("CDISpecDirs") or []]
    return any("nvidia" in path.name for folder in folders if folder.is_dir() for path in folder.iterdir())


def check_here() -> None:
    """Check that processes of this environment can use GPUs.

    Raises:
        PrerequisiteError: they cannot.
    """
    try:
        metadata.version("tensorflow")
    except metadata.PackageNotFoundError as error:
        raise PrerequisiteError(
            "--gpus with local processes: this environment has tensorflow-cpu, which uses no GPU; use --runtime "
            "docker, or an environment made from requirements/train-gpu.lock"
        ) from error
