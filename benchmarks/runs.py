"""Runs of the project's commands, and of the programs to compare with, in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.common import EVERY
from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.launch import folders
from cluster.host.runtime import supervisor
from cluster.system import processes
from cluster.system.errors import RunFailed, TimedOut
from cluster.system.json_files import read_json
from cluster.system.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent
DATASET = "fashion_mnist"
GLOBAL_BATCH = 192
TRAINING = ("--epochs=1000", f"--steps-per-loop={EVERY}", f"--log-every={EVERY}", "--evaluate-every=1000000")
QUICK_STEPS = 3 * EVERY
ENDLESS = 100_000
"""Steps of a training that is ended once the measured steps are done."""
LIMIT_S = 300.0
"""Longest time of one run."""
POLL_S = 0.25
"""Seconds between polls of a run's records, which are timestamped: polling more often would only slow the run down."""


@dataclass(frozen=True)
class Bench:
    """A folder of runs, and the extent of the measurements."""

    folder: Path
    rounds: int = 5
    quick: bool = False
    """Only try whether everything works: one round of few steps."""
    runtime: str = "auto"
    peers: bool = False
    """Compare with PyTorch and Ray, too."""
    log: Callable[[str], object] = print
    """Receives lines of progress."""

    def steps(self, count: int) -> int:
        """Return the number of steps to do: `count`, or fewer if `quick`."""
        return min(count, QUICK_STEPS) if self.quick else count

    def turns(self, times: int = 1) -> Iterator[int]:
        """Yield the number of each round from 0, for `times` times as many rounds as requested."""
        for turn in range(1 if self.quick else self.rounds * times):
            self.log(f"  round {turn + 1}")
            yield turn

    @property
    def engine(self) -> bool:
        """Whether containers are measured, too."""
        return self.runtime != "local" and engine.probe().ready

    @property
    def arrays(self) -> Path:
        """The folder of the prepared arrays, for programs that read them directly."""
        return _newest(folders.data_dir() / "arrays", "arrays.json")

    @property
    def shards(self) -> Path:
        """The folder of the prepared TFRecord shards."""
        return _newest(folders.data_dir() / "shards", "shards.json")

    # Ours

    def invoke(self, *words: str, **environment: str) -> None:
        """Run a command of the project to its end."""
        self.call([sys.executable, "-m", "invoke", *words], environment)

    def up(
        self, name: str, *words: str, steps: int, overrides: Sequence[str] = (), runtime: str = "local", **more: str
    ) -> RunFolder:
        """Start a training without TensorBoard; return once it trains if `--detach` is among the words."""
        options = (f"--name={name}", "--fresh", f"--runtime={runtime}", "--tensorboard-port=0")
        self.invoke("up", *options, *words, "--", *TRAINING, f"--max-steps={steps}", *overrides, **more)
        return RunFolder(self.folder / name)

    def train(self, name: str, *words: str, steps: int, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Train for this many steps, alone on the machine, then end the run; return the chief's rows."""
        run = self.up(name, *words, "--detach", steps=ENDLESS, overrides=overrides, STANDBY="0")
        rows = self.await_step(run, steps)
        supervisor.kill_run(run)
        return rows

    def await_step(self, run: RunFolder, steps: int) -> list[dict[str, Any]]:
        """Wait until a run has done this many steps; return the chief's rows.

        Raises:
            RunFailed: the run ended before.
            TimedOut: it takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = run.summary.exists()
            rows = [row for row in run.rows("chief") if row.get("loss") is not None]
            if rows and rows[-1]["step"] >= steps:
                return rows
            if ended:
                raise RunFailed(f"{run.name} ended before step {steps}: {read_json(run.summary).get('cause')}")
            if time.monotonic() > deadline:
                raise TimedOut(f"{run.name} did not do {steps} steps in {LIMIT_S:g} s")
            time.sleep(POLL_S)

    # Others

    def call(self, command: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
        """Run a command to its end; return its stdout.

        Raises:
            RunFailed: it failed.
            TimedOut: it takes too long.
        """
        with tempfile.TemporaryFile("w+") as errors:
            try:
                done = subprocess.run(
                    command,
                    cwd=cwd,
                    env=os.environ | dict(environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    check=False,
                    timeout=LIMIT_S,
                )
            except subprocess.TimeoutExpired:
                raise TimedOut(f"{' '.join(command[:4])} ... did not end in {LIMIT_S:g} s") from None
            if done.returncode:
                errors.seek(0)
                last = (done.stdout + errors.read()).strip().splitlines()[-8:]
                raise RunFailed(f"{' '.join(command[:4])} ... ended with {done.returncode}: {' | '.join(last)}")
        return done.stdout

    def rows(self, command: Sequence[str], **environment: str) -> list[dict[str, Any]]:
        """Run a command that prints its steps as lines of JSON; return them."""
        lines = self.call(command, environment).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def baseline(self, script: str, workers: int, steps: int, *words: str, **environment: str) -> list[dict[str, Any]]:
        """Run a module of `benchmarks.baselines` on a chief and this many workers; return the chief's rows."""
        command = [sys.executable, "-m", f"benchmarks.baselines.{script}", f"--arrays={self.arrays}"]
        command += [f"--steps={steps}", f"--global-batch={GLOBAL_BATCH}", *words]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2"} | environment
        tasks = self._tf_configs(workers)
        others = [self._start(command, environment | config) for config in tasks[1:]]
        try:
            rows = self.rows(command, **environment, **tasks[0])
            for other in others:
                with contextlib.suppress(subprocess.TimeoutExpired):  # a hang in the teardown, after all steps
                    other.wait(30)
        finally:
            for other in others:
                other.kill()
                other.wait()
        return rows

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _tf_configs(self, workers: int) -> list[dict[str, str]]:
        if not workers:
            return [{}]
        addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + workers)]
        cluster = {"chief": addresses[:1], "worker": addresses[1:]}
        members = [("chief", 0), *(("worker", index) for index in range(workers))]
        return [
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}
            for role, index in members
        ]


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    """Provide a folder for runs, and end the processes left in it, even on SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    kept = {name: os.environ.get(name) for name in ("RUNS_DIR", "DATA_DIR", "PYTHONDONTWRITEBYTECODE")}
    data_dir = str(folders.data_dir())
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            # These identify the processes started here and all their descendants.
            os.environ |= {"RUNS_DIR": folder, "DATA_DIR": data_dir}
            os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # modules are compiled once, as users' are
            runs = Bench(Path(folder), **options)
            try:
                yield runs
            finally:
                with contextlib.suppress(RunFailed, TimedOut):
                    runs.invoke("down", "--timeout=0")
                processes.kill_with_environment("RUNS_DIR", folder)
    finally:
        signal.signal(signal.SIGTERM, before)
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _newest(folder: Path, index: str) -> Path:
    found = sorted(folder.glob(f"{DATASET}-*/{index}"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent
