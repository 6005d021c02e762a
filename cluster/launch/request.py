"""What was asked for on the command line of `up` and `plan`, and what it means together."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import strategies
from cluster.errors import PrerequisiteError, UsageError, nearest
from cluster.runtime import tensorboard
from cluster.spec import ClusterSpec, Role

PRESET = "fashion_mnist"
LOOPS = ("custom", "fit")
WORKERS = "2"
DEVICE_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Where a TPU of this machine shows itself."""


@dataclass(frozen=True)
class Request:
    """What was asked for, as typed; empty is what was left out."""

    workers: str = ""
    ps: str = ""
    evaluator: bool = False
    preset: str = ""
    loop: str = ""
    script: str = ""
    requirements: str = ""
    env: Sequence[str] = ()
    """Variables for every task: `NAME`, with the caller's value, or `NAME=VALUE`."""
    separate_chief: bool = False
    strategy: str = ""
    devices: str = ""
    runtime: str = "auto"
    gpus: str = ""
    gpus_per_task: str = ""
    gpu_runtime: str = ""
    nccl_debug: str = ""
    memory: str = ""
    network: str = ""
    bitwise_elastic: str = ""
    precision: str = ""
    checkpoint_every: str = ""
    hang_timeout: str = ""
    max_restarts: str = ""
    name: str = ""
    resume: str = ""
    trust: bool = False
    """Whether a run to go on with, or to make again, may be one that this user did not start."""
    again: str = ""
    """The run to make once more, in a folder of its own."""
    fresh: bool = False
    tensorboard_port: str = str(tensorboard.PORT)
    overrides: Sequence[str] = ()
    """The words after `--`: overrides of the training configuration, or a script's arguments."""

    @property
    def asks_for_help(self) -> bool:
        """Whether the training options are to be shown."""
        return not self.script and any(word in ("--help", "-h") for word in self.overrides)

    def training(self) -> list[str]:
        """Return the overrides of the training configuration, those that are options of `up` first."""
        options = {"--loop": self.loop} if self.loop else {}
        if self.bitwise_elastic:
            options |= {"--bitwise-elastic": self.bitwise_elastic}
        if self.precision:
            options |= {"--precision": self.precision}
        if self.checkpoint_every:
            options |= {"--checkpoint-every": self.checkpoint_every}
        return [word for option in options.items() for word in option] + list(self.overrides)

    def run_name(self) -> str:
        """Return what the run is called unless it was given a name."""
        origin = self.again or (Path(self.script).stem if self.script else self.preset or PRESET)
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", origin).strip("-._")[:40] or "run"
        return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_together(request: Request, *, scripted: bool) -> None:
    """Check that what was asked for goes together.

    Args:
        request: what was asked for.
        scripted: whether the tasks run a script: one was given, or the resumed run had one.

    Raises:
        UsageError: it does not.
    """
    if request.loop and request.loop not in LOOPS:
        raise UsageError(f"--loop {request.loop!r} is not a loop{nearest(request.loop, LOOPS)}")
    if request.resume and (request.name or request.fresh):
        raise UsageError("--resume names its run: leave out --name and --fresh")
    if request.trust and not request.resume and not request.again:
        raise UsageError("--trust without --resume: it is for a run that somebody else started; leave it out")
    if request.resume and request.script:
        raise UsageError("--resume goes on with what its run was started with: leave out --script")
    trainer = {
        "preset": request.preset,
        "loop": request.loop,
        "bitwise-elastic": request.bitwise_elastic,
        "precision": request.precision,
        "checkpoint-every": request.checkpoint_every,
    }
    if scripted and (given := [f"--{name}" for name, value in trainer.items() if value]):
        raise UsageError(f"{' and '.join(given)} with a script: they are the built-in trainer's; leave them out")
    if request.separate_chief and not scripted:
        raise UsageError("--separate-chief is for scripts, whose TF_CONFIG it changes; add --script FILE")
    if scripted and request.evaluator:
        raise UsageError(
            "--evaluator with a script: it evaluates the built-in trainer's checkpoints; evaluate in the script instead"
        )


def topology(request: Request, resumed: ClusterSpec | None = None) -> dict[str, Any]:
    """Return the options of `spec.build` for what was asked; what was left out is the resumed run's, or the default."""
    strategy = request.strategy or "auto"
    kind = None if strategy == "auto" else strategies.get(strategy)
    alone = kind is not None and kind.one_process
    if resumed is None:
        return {
            "workers": request.workers or ("0" if alone else WORKERS),
            "ps": request.ps or "0",
            "evaluator": request.evaluator,
            "strategy": strategy,
            "devices": request.devices or "1",
        }
    had_workers, had_ps = (str(len(resumed.of(role))) for role in (Role.WORKER, Role.PS))
    if kind and not alone and had_workers == "0":
        had_workers = WORKERS
    workers = request.workers or ("0" if alone else had_workers)
    ps = request.ps or ("0" if workers == "0" or (kind and not kind.served) else had_ps)
    if not request.strategy and resumed.kind.one_process == (workers == "0") and not request.ps:
        # What the topology chose once it chooses again: the number of devices alone tells OneDevice from Mirrored.
        counts = (len(resumed.of(Role.WORKER)), len(resumed.of(Role.PS)), resumed.devices)
        strategy = "auto" if strategies.resolve("auto", *counts) == resumed.kind else resumed.strategy
    return {
        "workers": workers,
        "ps": ps,
        "evaluator": request.evaluator or bool(resumed.of(Role.EVALUATOR)),
        "strategy": strategy,
        "devices": request.devices or ("1" if kind and kind.single_device else str(resumed.devices)),
    }


def check_hardware(strategy: str) -> None:
    """Check that a strategy's hardware can be had here.

    Raises:
        PrerequisiteError: this machine has none, and none was named.
    """
    if strategy == "auto" or strategies.get(strategy).hardware != "tpu":
        return
    has_device = any(list(Path("/").glob(pattern.lstrip("/"))) for pattern in DEVICE_FILES)
    if not os.environ.get("TPU_NAME") and not has_device:
        raise PrerequisiteError(
            f"--strategy {strategy}: this machine has no TPU (no /dev/accel* and no /dev/vfio); run this on a TPU VM, "
            "or set TPU_NAME to a TPU that this machine can reach"
        )
