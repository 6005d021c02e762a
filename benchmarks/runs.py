"""Runs of the project's own commands, as local processes in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.runs import RunFolder

ROOT = Path(__file__).resolve().parent.parent
TRAINING = ("--epochs=1000", "--steps-per-loop=25", "--log-every=25", "--evaluate-every=1000000")


@dataclass(frozen=True)
class Bench:
    """A folder of runs."""

    folder: Path

    def invoke(self, *words: str, **environment: str) -> None:
        """Run a command of the project to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "invoke", *words],
            cwd=ROOT,
            env=os.environ | {"RUNS_DIR": str(self.folder)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout)

    def up(self, name: str, *words: str, steps: int, overrides: Sequence[str] = (), **environment: str) -> RunFolder:
        """Start a training without TensorBoard; return once it trains where `--detach` is among the words."""
        options = (f"--name={name}", "--fresh", "--runtime=local", "--tensorboard-port=0")
        self.invoke("up", *options, *words, "--", *TRAINING, f"--max-steps={steps}", *overrides, **environment)
        return RunFolder(self.folder / name)


@contextmanager
def bench() -> Iterator[Bench]:
    """Give a folder for runs, and end what is left in it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        runs = Bench(Path(folder))
        try:
            yield runs
        finally:
            runs.invoke("down", "--timeout=0")
