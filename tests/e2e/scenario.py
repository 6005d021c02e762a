"""What scenarios do: bring up clusters with the project's own commands, wait for conditions, read run folders."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import teardown
from cluster.host.runtime import supervisor, tensorboard
from cluster.system.json_files import read_json
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DATA_DIR", ROOT / "data"))
IMAGES = {"IMAGE_NAMESPACE": "tf-cluster-tests"}
"""Images of the tests' own, so that none which a user's run may use is replaced."""
TRAIN_IMAGE, TENSORBOARD_IMAGE = (f"tf-cluster-tests/{name}" for name in ("train:cpu", "tensorboard:latest"))
STEPS = 40
TRAINING = (
    *("--max-steps", str(STEPS), "--global-batch", "48", "--log-every", "1"),
    *("--steps-per-loop", "5", "--evaluate-every", "1000"),
)
"""A short training whose every step is logged and that comes back to Python every 5 steps, in small batches."""
ENDLESS = ("--max-steps", "100000", "--epochs", "1000")
"""For a run that is stopped once it has done what a test needs: on a slow machine, too, it does not end before."""

SLOW_MACHINE_S = 900
"""Longest wait for what happens soon on an idle machine."""


@dataclass
class Clusters:
    """Runs the project's own commands on a folder of runs that belongs to the tests."""

    runs_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    checkout: Path = ROOT
    limits: tuple[str, ...] = ()
    """A program that sets limits, and its arguments, before each command."""
    module: str = "invoke"
    """Module that is run with the words of each command."""

    @property
    def settings(self) -> dict[str, str]:
        return {"RUNS_DIR": str(self.runs_dir), "DATA_DIR": str(DATA), **IMAGES}

    def popen(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.limits, sys.executable, "-m", self.module, *words],
            cwd=self.checkout,
            env=os.environ | self.settings | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def invoke(self, *words: str, expect: int = 0, timeout_s: float = 240) -> str:
        """Run `invoke` with these words to its end; return its output."""
        process = self.popen(*words)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"invoke {' '.join(words)} hangs: {process.communicate()[0]}\n{self.logs()}") from None
        assert expect == process.returncode, f"{output}\n{self.logs()}"
        return output

    def with_modules(self, folder: Path, *, own_data: bool = False, **sources: str) -> "Clusters":
        """Return the commands of a user who has these modules in a folder, and there, if so, all data."""
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source)
        data = {"DATA_DIR": str(folder / "data")} if own_data else {}
        return replace(self, environment=self.environment | {"PYTHONPATH": str(folder), **data})

    def up(
        self,
        name: str,
        *words: str,
        runtime: str = "local",
        training: tuple[str, ...] = TRAINING,
        port: int = 0,
        expect: int = 0,
        timeout_s: float = 240,
    ) -> RunFolder:
        """Bring up a cluster for a training; return its run folder. Without a port, TensorBoard is left out."""
        options, _, more = f" {' '.join(words)} ".partition(" -- ")
        start = ("up", f"--name={name}", f"--runtime={runtime}", f"--tensorboard-port={port}", *options.split())
        self.invoke(*start, "--", *training, *more.split(), expect=expect, timeout_s=timeout_s)
        return self.run(name)

    def check_bits(self, run: RunFolder, *words: str, training: tuple[str, ...] = TRAINING) -> None:
        """Stop a run, and check that it has the weights of as many steps of local processes that nothing disturbed."""
        self.invoke("stop", run.name, timeout_s=SLOW_MACHINE_S)
        ended = summary(run)
        assert "stopped" == ended["state"]
        words = (*words, "--", *ENDLESS, f"--max-steps={ended['steps']}")
        undisturbed = self.up(f"calm-{run.name}", *words, training=training, timeout_s=SLOW_MACHINE_S)
        assert summary(undisturbed)["weights_sha256"] == ended["weights_sha256"]

    def rerun(self, name: str, *words: str) -> tuple[str, RunFolder]:
        """Make a run once more; return the output and its folder."""
        output = self.invoke("rerun", name, *words)
        return output, self.run(Path(output.splitlines()[-1].split()[-1]).name)

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.runs_dir / name)

    def down(self) -> None:
        """End whatever still runs, and check that nothing is left."""
        if teardown.find_leftovers(self.runs_dir)[0] or tensorboard.running_port(self.runs_dir):
            self.invoke("down")
        for path in self.runs_dir.glob("*/cluster.json"):
            assert [] == supervisor.processes_left(RunFolder(path.parent))

    def logs(self) -> str:
        """Return the end of every task's log, for the report of a failure."""
        paths = sorted(self.runs_dir.glob("*/logs/*.log"), key=lambda path: path.stat().st_mtime)[-6:]
        return "\n".join(f"--- {path}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in paths)


def summary(run: RunFolder) -> dict[str, Any]:
    return read_json(run.summary)


def step_of(run: RunFolder) -> int:
    """Return the chief's newest step."""
    beat = run.heartbeat("chief")
    return beat.step if beat else 0


def await_members(run: RunFolder, *left_out: str) -> None:
    """Wait until the run trains without these tasks, and with all others."""
    members = run.load_cluster().without(left_out).tasks

    def trains() -> bool:
        beats, generation = run.heartbeats(), run.generation
        states = [(beats[t.name].state, beats[t.name].generation) if t.name in beats else None for t in members]
        assert not run.load_summary(), summary(run)
        return membership.left_out(run, generation) == set(left_out) and set(states) == {("training", generation)}

    wait_for(trains, f"the run to train without {left_out}", SLOW_MACHINE_S)
    reached = step_of(run)
    wait_for(lambda: step_of(run) > reached, "a new step", SLOW_MACHINE_S)
