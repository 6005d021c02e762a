"""PyTorch and Ray Train on the same model, data and batch, each in a separate environment, on request.

Missing environments are created: Ray's from the lock files in `requirements/`, PyTorch's from its version alone,
because its builds and their dependencies depend on the package index. `TORCH_PYTHON` and `RAY_PYTHON` name another
Python to use, or leave a peer out if empty.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.common import EVERY
from benchmarks.contenders import Contender, Setting, threads
from benchmarks.runs import GLOBAL_BATCH, ROOT, Bench
from cluster.system.errors import PrerequisiteError
from cluster.system.messages import counted, short_path

ENVIRONMENTS = ROOT / ".build" / "peers"
PIP = shlex.split("-m pip --disable-pip-version-check --quiet install")
LOCKED = shlex.split("--require-hashes --no-deps --use-pep517 --no-build-isolation")
INSTALL_LIMIT_S = 900.0


@dataclass(frozen=True)
class Peer:
    """Another framework that trains on several tasks."""

    title: str
    module: str
    """Module that its Python must have."""
    variable: str
    """Environment variable that names the Python to use."""
    packages: tuple[tuple[str, ...], ...]
    """Arguments of the pip calls that create its environment, in order."""
    command: Callable[[int], list[str]]
    """Number of tasks -> arguments of Python."""
    settings: Callable[[int], Sequence[Setting]]
    alone: bool

    @property
    def made(self) -> Path:
        """The Python of the environment that `prepare` creates."""
        return ENVIRONMENTS / self.module / "bin" / "python"

    @property
    def python(self) -> str:
        """The Python to use; empty if there is none yet."""
        return os.environ.get(self.variable, str(self.made) if _ready(self.made).exists() else "")

    def contender(self, bench: Bench) -> Contender:
        """Return the program to measure, with its version in the title."""
        asked = f"from importlib.metadata import version; print(version({self.module!r}))"
        version = bench.call([self.python, "-c", asked]).strip()
        return Contender(f"{self.title} {version}", self.settings, self._run, self.alone)

    def training_command(
        self, bench: Bench, tasks: int, steps: int, setting: Setting, *more: str
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of a training, and the variables of its environment."""
        options = [f"--arrays={bench.arrays}", f"--steps={steps}", f"--global-batch={GLOBAL_BATCH}", *setting.words]
        # Ray leaves files in the home folder.
        environment = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "HOME": str(bench.folder)}
        return [self.python, *self.command(tasks), *options, *more], environment | dict(setting.environment)

    def _run(self, bench: Bench, tasks: int, steps: int, setting: Setting) -> list[dict[str, Any]]:
        command, environment = self.training_command(bench, tasks, steps, setting)
        return bench.rows(command, **environment)


def _torch_settings(tasks: int) -> list[Setting]:
    return [
        Setting("as in the tutorial"),
        *(
            Setting(
                f"{counted(count, 'thread')}, batches by {how}{', channels last' if layout else ''}",
                (f"--threads={count}", f"--input={how}", *layout),
            )
            for count in threads(tasks)
            for how, layout in (("loader", ()), ("index", ()), ("index", ("--channels-last",)))
        ),
    ]


def _ray_settings(tasks: int) -> list[Setting]:
    return [
        Setting("as in the guide"),
        *(
            Setting(
                f"oneDNN, {counted(count, 'thread')}, {EVERY} steps an execution",
                (f"--threads={count}", f"--steps-per-execution={EVERY}"),
            )
            for count in threads(tasks)
        ),
    ]


PEERS = (
    Peer(
        "torchrun DDP",
        "torch",
        "TORCH_PYTHON",
        (("torch==2.13.0", "numpy"),),
        lambda tasks: [
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tasks}"),
            *("-m", "benchmarks.baselines.torchrun_ddp"),
        ],
        _torch_settings,
        alone=True,
    ),
    Peer(
        "Ray Train",
        "ray",
        "RAY_PYTHON",
        (
            (*LOCKED, "-r", "requirements/build.lock"),  # packages that build the others
            (*LOCKED, "-r", "requirements/train-cpu.lock", "-r", "requirements/peer-ray.lock"),
        ),
        lambda tasks: ["-m", "benchmarks.baselines.ray_train", f"--tasks={tasks}"],
        _ray_settings,
        alone=False,
    ),
)


def chosen(bench: Bench) -> list[Contender]:
    """Return the peers to measure in addition to the hand-written baselines."""
    return [peer.contender(bench) for peer in PEERS if peer.python] if bench.peers else []


def prepare(log: Callable[[str], object]) -> None:
    """Create the environments that are missing.

    Raises:
        PrerequisiteError: an environment cannot be created.
    """
    for peer in PEERS:
        if peer.variable not in os.environ and not peer.python:
            log(f"making {short_path(peer.made.parent.parent)} (once, some minutes)")
            _make(peer)


def _make(peer: Peer) -> None:
    folder, log = peer.made.parent.parent, ENVIRONMENTS / f"{peer.module}.log"
    folder.parent.mkdir(parents=True, exist_ok=True)
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    commands += [[str(peer.made), *PIP, *words] for words in peer.packages]
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
    """Return the file that marks an environment as complete."""
    return python.parent.parent / ".complete"
