"""PyTorch and Ray Train on the same model, data and batch, each in an environment of its own, on request.

Ray's is made from `requirements/` where it is missing. PyTorch is not locked: its packages bring several GB of CUDA
along, so `TORCH_PYTHON` names a Python that has it. `RAY_PYTHON` does the same for Ray.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runs import GLOBAL_BATCH, ROOT, Bench, cores
from cluster.errors import PrerequisiteError
from cluster.messages import short_path

ENVIRONMENTS = ROOT / ".build" / "peers"
INSTALL = shlex.split(
    "-m pip --disable-pip-version-check --quiet install --require-hashes --no-deps --use-pep517 --no-build-isolation"
)
INSTALL_LIMIT_S = 900.0

Run = Callable[[Bench, int, int], list[dict[str, Any]]]
"""Trains on so many tasks for so many steps, and returns the first task's rows."""


@dataclass(frozen=True)
class Peer:
    """Something else that trains on several tasks."""

    title: str
    module: str
    """That Python must have."""
    variable: str
    """Names the Python to use."""
    locks: tuple[str, ...]
    """What its environment is made from; none: it cannot be made."""
    command: Callable[[int], list[str]]
    """Python's words, by the number of tasks."""

    @property
    def made(self) -> Path:
        """The Python of the environment that is made."""
        return ENVIRONMENTS / self.module / "bin" / "python"

    @property
    def python(self) -> str:
        """The Python to use; empty where there is none yet."""
        return os.environ.get(self.variable, "") or (str(self.made) if _ready(self.made).exists() else "")

    def run(self, bench: Bench, tasks: int, steps: int) -> list[dict[str, Any]]:
        """Train; return the first task's rows."""
        options = [f"--arrays={bench.arrays}", f"--steps={steps}", f"--threads={cores()}", f"--tasks={tasks}"]
        command = [self.python, *self.command(tasks), *options, f"--global-batch={GLOBAL_BATCH}"]
        # Ray leaves files in the home folder.
        return bench.rows(command, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="2", HOME=str(bench.folder))


PEERS = (
    Peer(
        "torchrun DDP",
        "torch",
        "TORCH_PYTHON",
        (),
        lambda tasks: [
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tasks}"),
            *("-m", "benchmarks.baselines.torchrun_ddp"),
        ],
    ),
    Peer(
        "Ray Train",
        "ray",
        "RAY_PYTHON",
        ("build", "train-cpu", "peer-ray"),
        lambda tasks: ["-m", "benchmarks.baselines.ray_train"],
    ),
)


def chosen(bench: Bench) -> dict[str, Run]:
    """Return what is measured beside the hand-written baselines, by the title of each."""
    return {peer.title: peer.run for peer in PEERS if peer.python} if bench.peers else {}


def prepare(log: Callable[[str], object]) -> None:
    """Make the environments that can be made, and say which peer is left out.

    Raises:
        PrerequisiteError: none is left, or an environment cannot be made.
    """
    for peer in PEERS:
        if not peer.python and peer.locks:
            log(f"making {short_path(peer.made.parent.parent)} (once, some minutes)")
            _make(peer)
        if not peer.python:
            log(f"{peer.title}: left out; {peer.variable} may name a Python with {peer.module}")
    if not any(peer.python for peer in PEERS):
        raise PrerequisiteError("--peers: there is no peer; set TORCH_PYTHON or RAY_PYTHON")


def _make(peer: Peer) -> None:
    folder, log = peer.made.parent.parent, ENVIRONMENTS / f"{peer.module}.log"
    folder.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = peer.locks
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(peer.made), *INSTALL, "-r", f"requirements/{first}.lock"],  # what builds the others
        [str(peer.made), *INSTALL, *(word for lock in rest for word in ("-r", f"requirements/{lock}.lock"))],
    ]
    with log.open("wb") as output:
        for command in commands:
            done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False, timeout=INSTALL_LIMIT_S)
            if done.returncode:
                raise PrerequisiteError(
                    f"the environment of {peer.title} cannot be made; see {short_path(log)}, or set "
                    f"{peer.variable} to a Python with {peer.module}"
                )
    _ready(peer.made).touch()


def _ready(python: Path) -> Path:
    """Return the file that says that an environment is complete."""
    return python.parent.parent / ".complete"
