"""Short real trainings with every strategy and both loops, to check that each trains and that their results agree.

Each is a separate `invoke up`, one after another, in a temporary folder of runs.
"""

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.strategies import STRATEGIES, Strategy
from cluster.host.launch import folders
from cluster.host.view.columns import cell, columns
from cluster.system import processes
from cluster.system.errors import EXIT_DONE, EXIT_PREREQUISITE

DATASET = "fashion_mnist"
STEPS = 20
TRAINING = f"--max-steps {STEPS} --log-every 1 --steps-per-loop 5 --evaluate-every 1000".split()
"""The options of a short training that logs every step and is evaluated only at its end."""

PARITY_STEPS = 10
PARITY = 1e-6
"""Tolerance, relative, between the losses of the first steps and the reference's, due to the order of sums."""
ACCURACY = 0.002
"""Tolerance between the accuracy on the test set and the reference's."""
BAND = 0.05
"""Tolerance, relative, between an asynchronous training's evaluation loss and the reference's."""

CASE_LIMIT_S = 90.0
LIMIT_S = 285.0
"""Time limit for all cases together, in seconds."""

OK, FAILED, UNVERIFIED = "ok", "failed", "not verified on hardware"

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training, by its options of `up`."""

    strategy: str
    loop: str

    @property
    def kind(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def options(self) -> str:
        return f"--strategy {self.strategy} {self.kind.trial}".strip()

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.loop}"


_PAIRS = itertools.product(STRATEGIES, ("custom", "fit"))
CASES = tuple(Case(name, loop) for name, loop in _PAIRS if loop == "custom" or not STRATEGIES[name].staged)
"""The cases. The first one is the reference with which the others are compared."""


@dataclass(frozen=True)
class CaseOutcome:
    """How a case's run ended."""

    code: int | None
    """The exit code of `up`; None if it did not end by itself."""
    problem: str = ""
    seconds: float = 0.0
    keras: str | None = None
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def verify_strategies(log: Callable[[str], object]) -> list[Row]:
    """Run every case, log a line about each, and return its row of `invoke verify --json`."""
    deadline, reference = time.monotonic() + LIMIT_S, None
    rows: list[Row] = []
    runs = Path(tempfile.mkdtemp(prefix="tf-cluster-verify-"))
    # Handle SIGTERM like Ctrl-C, to end the started run.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for case in CASES:
            ended = train_case(case, runs, min(CASE_LIMIT_S, deadline - time.monotonic()))
            if case == CASES[0] and not ended.problem:
                reference = ended
            row = judge_case(case, ended, reference)
            rows.append(row)
            log(f"{len(rows)}/{len(CASES)}  {case.name}: {row['status']}")
    finally:
        signal.signal(signal.SIGTERM, before)
        if count_failed(rows):
            log(f"run folders of what failed, and the output of `up`: {runs}")
        else:
            shutil.rmtree(runs)
    return rows


def count_failed(rows: list[Row]) -> int:
    """Return the number of failed rows."""
    return sum(row["status"] == FAILED for row in rows)


def train_case(case: Case, runs: Path, limit_s: float) -> CaseOutcome:
    """Run a case in a folder of runs; all its processes have ended when this returns."""
    if limit_s <= 0:
        return CaseOutcome(None, f"not started: all cases have {LIMIT_S:g} s together, and these are over")
    log, scratch, began = runs / f"{case.name}.log", runs / "tmp", time.monotonic()
    scratch.mkdir(exist_ok=True)  # TensorFlow leaves temporary files behind when it is ended
    places = {"RUNS_DIR": str(runs), "DATA_DIR": str(folders.data_dir()), "TMPDIR": str(scratch)}
    up, environment = None, os.environ | places
    with log.open("wb") as output:
        try:
            up = processes.start_detached(case_command(case), environment=environment, output=output)
            code = up.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            processes.kill_with_environment("RUNS_DIR", str(runs))
            if up:  # None if interrupted during its start
                up.wait()
    printed = log.read_text(errors="replace").splitlines()
    return _read(RunFolder(runs / case.name), code, printed, time.monotonic() - began)


def case_command(case: Case) -> list[str]:
    """Return the command that runs a case."""
    options = f"up --name {case.name} --runtime local --tensorboard-port 0 {case.options} --loop {case.loop}"
    return [sys.executable, "-m", "invoke", *options.split(), "--", *TRAINING]


def judge_case(case: Case, ended: CaseOutcome, reference: CaseOutcome | None) -> Row:
    """Return the row of a case's outcome; the reference is None if the first case failed."""
    parity = None
    if case.kind.hardware and ended.code == EXIT_PREREQUISITE:
        status, detail = UNVERIFIED, ended.problem
    elif ended.problem:
        status, detail = FAILED, ended.problem
    elif reference is None:
        status, detail = FAILED, f"nothing to compare it with: {CASES[0].name} failed"
    else:
        if case.kind.synchronous:
            parity = max(abs(ended.losses[step] / reference.losses[step] - 1) for step in range(1, PARITY_STEPS + 1))
        problem = _disagreement(ended, reference, parity)
        status, detail = (FAILED, problem) if problem else (OK, _in_words(ended, parity))
    row = {"strategy": case.kind.class_name, "loop": case.loop, "keras": ended.keras}
    return row | {"status": status, "parity": parity, "detail": detail}


def table_lines(rows: list[Row]) -> list[str]:
    """Format the rows as a table for a terminal."""
    shown = [("STRATEGY", "LOOP", "KERAS", "STATUS", "PARITY", "DETAIL")]
    for row in rows:
        parity = cell(row["parity"], "{:.1e}")
        shown.append((row["strategy"], row["loop"], cell(row["keras"]), row["status"], parity, row["detail"]))
    return columns(shown, right=(4,))


def _read(run: RunFolder, code: int | None, printed: list[str], seconds: float) -> CaseOutcome:
    summary, result = run.load_summary(), run.result
    losses = run.losses()
    missing = [step for step in range(1, STEPS + 1) if step not in losses]
    problem = ""
    if code is None:
        states = ", ".join(f"{name} {beat.state}" for name, beat in run.heartbeats().items()) or "no task started"
        problem = f"ended after {seconds:.0f} s because it was not done: {states}"
    elif code != EXIT_DONE or summary is None or summary.state != "succeeded":
        errors = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
        cause = summary.failure.error if summary and summary.failure else None
        state = summary.state if summary else None
        problem = cause or (errors or [f"`up` ended with exit code {code}, the run {state}"])[-1]
    elif summary.restarts:
        problem = "; ".join(f"restarted: {restart.task}, {restart.cause}" for restart in summary.restarts)
    elif missing:
        problem = f"the loss of step {missing[0]} is missing or not finite"
    metrics = {name: value for name, value in (summary.metrics if summary else {}).items() if value is not None}
    return CaseOutcome(code, problem, seconds, result.keras, losses, metrics)


def _disagreement(ended: CaseOutcome, reference: CaseOutcome, parity: float | None) -> str:
    """Describe how a training and the reference disagree; empty if they agree. NaN counts as a disagreement."""
    first, last = ended.losses[1], ended.losses[STEPS]
    if parity is None:
        loss, expected = (each.metrics.get("eval_loss", math.nan) for each in (ended, reference))
        if not last < first:
            return f"it does not learn: loss {first:.4f} at step 1, {last:.4f} at step {STEPS}"
        if not abs(loss / expected - 1) <= BAND:
            return f"evaluation loss {loss:.4f}, {expected:.4f} in {CASES[0].name}: expected within {BAND:.0%}"
        return ""
    if not parity <= PARITY:
        return f"losses up to {parity:.1e} from those of {CASES[0].name}: expected within {PARITY:.0e}"
    accuracy, expected = (each.metrics.get("eval_accuracy", math.nan) for each in (ended, reference))
    if not abs(accuracy - expected) <= ACCURACY:
        return f"accuracy {accuracy:.4f}, {expected:.4f} in {CASES[0].name}: expected within {ACCURACY}"
    return ""


def _in_words(ended: CaseOutcome, parity: float | None) -> str:
    how = "asynchronous, so compared by its convergence: " if parity is None else ""
    accuracy, loss = (ended.metrics.get(name, math.nan) for name in ("eval_accuracy", "eval_loss"))
    results = f"accuracy {accuracy:.4f}, evaluation loss {loss:.4f}"
    return f"{how}loss {ended.losses[1]:.4f} to {ended.losses[STEPS]:.4f}, {results}, {ended.seconds:.0f} s"
