"""Conducts a campaign: one run after the other, each with faults and compared with an undisturbed run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.campaign import record, volleys
from benchmarks.campaign.cases import Case
from benchmarks.campaign.injection import Injection
from benchmarks.campaign.record import Row
from cluster.contract.run.folder import RunFolder
from cluster.host.image import checkout
from cluster.host.launch import folders
from cluster.host.runtime import registry
from cluster.system import processes
from cluster.system.errors import RunFailed, UsageError
from cluster.system.files import ROOT
from cluster.system.messages import counted
from cluster.system.waiting import wait_until

FAULTS_S, LAST_FAULTS_S, RUN_S = 90.0, 180.0, 300.0
"""How long faults are injected into a run, and at its end, and when an unfinished run counts as lost."""
RESUMED_RUNS = 3
"""One of this many runs is ended by a fault, and resumed."""
START_S, KILL_S = 120.0, 60.0
STANDBY_DELAY_S = ("0", "2", "")
"""Seconds of training before standby processes start: in turn, so that faults strike before, during and after that."""


def main(
    cases: Sequence[Case],
    faults: int,
    seed: int,
    limit_s: float,
    log: Callable[[str], object],
    keep: Callable[[Row], object] = lambda row: None,
) -> list[Row]:
    """Run the cases in turn until there were enough faults or the time is up; return a row for each run.

    The seed determines the faults of every run; the moment at which each is injected depends on the run.
    """
    rows: list[Row] = []
    began, runs = time.monotonic(), Path(tempfile.mkdtemp(prefix="tf-cluster-storms-"))
    campaign = _Campaign(runs)
    kept = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, case in zip(itertools.count(), itertools.cycle(cases)):
            done = sum(sum(row["kinds"].values()) for row in rows)
            if done >= faults or time.monotonic() - began > limit_s:
                break
            rows.append(campaign.run(case, f"{seed}-{number}"))
            keep(rows[-1])
            log(f"{done + sum(rows[-1]['kinds'].values())}/{faults}  {_in_words(rows[-1])}")
    except RunFailed:  # its message names a log
        kept = True
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        processes.kill_with_environment("RUNS_DIR", str(runs))
        campaign.end()  # containers do not inherit that variable
        if kept or failed(rows):
            log(f"the folders of the runs that were lost or changed: {runs}")
        else:
            shutil.rmtree(runs)
    return rows


def failed(rows: Sequence[Row]) -> bool:
    """Whether a run was lost or changed bits."""
    return any(row["lost"] or row["bits"] == record.CHANGED for row in rows)


class _Campaign:
    """Runs in one folder, and the results of the undisturbed ones."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._undisturbed: dict[str, str] = {}
        self._commit = checkout.commit()[:7]
        self._up: subprocess.Popen[bytes]
        self._newest: RunFolder | None = None

    def run(self, case: Case, seed: str) -> Row:
        """Make a run with faults; return its row.

        Raises:
            RunFailed: the undisturbed run failed.
        """
        expected = self._expected(case) if case.repeats else ""
        number = int(seed.rpartition("-")[2])
        began, delay_s = time.monotonic(), STANDBY_DELAY_S[number % len(STANDBY_DELAY_S)]
        run = self._start(f"{case.name}-{seed}", case.up(f"{case.name}-{seed}"), delay_s)
        drawn = volleys.draw(
            run.load_cluster(), f"{case.name} {seed}", _kinds(run, case, resumed=number % RESUMED_RUNS == 0)
        )
        injection = Injection(run, drawn, case.volleys)
        while lost := self._follow(run, injection, began):
            if not _resumable(run, injection):
                break
            self._resume(run, case, delay_s)
        bits = record.NOT_COMPARED
        if expected and not lost:
            bits = record.SAME if _result(run, case) == expected else record.CHANGED
        if not lost and bits != record.CHANGED:
            shutil.rmtree(run.path)
        seconds = time.monotonic() - began
        return record.row(case.name, seed, self._commit, injection.faults, lost=lost, bits=bits, seconds=seconds)

    def end(self) -> None:
        """End the newest run if it is still in progress, as after an interruption."""
        if self._newest and self._newest.path.exists():
            _kill(self._newest)

    def _follow(self, run: RunFolder, injection: Injection, began: float) -> str:
        """Inject faults into a run until it ends; return why it did not succeed, or an empty string."""
        injection.inject(began + FAULTS_S, began + LAST_FAULTS_S)
        lost = _end(run, began + RUN_S - time.monotonic())
        self._up.wait()
        return lost

    def _expected(self, case: Case) -> str:
        """Return the result of an undisturbed run of this case, which the first call starts."""
        if case.name not in self._undisturbed:
            run = self._start(f"calm-{case.name}", case.up(f"calm-{case.name}"), "")
            if lost := _end(run, RUN_S):
                raise RunFailed(f"the undisturbed run of {case.name} did not succeed: {lost}")
            self._up.wait()
            self._undisturbed[case.name] = _result(run, case)
        return self._undisturbed[case.name]

    def _start(self, name: str, words: Sequence[str], standby_delay_s: str) -> RunFolder:
        """Start a run in the background; return as soon as its chief has a program."""
        settings = {"RUNS_DIR": str(self._runs), "DATA_DIR": str(folders.data_dir()), "TMPDIR": str(self._runs / "tmp")}
        (self._runs / "tmp").mkdir(exist_ok=True)  # a TensorFlow process that is killed leaves temporary files behind
        run, log = RunFolder(self._runs / name), self._runs / f"{name}.log"
        run.programs("chief").unlink(missing_ok=True)  # of a run that is resumed
        self._newest = run
        with log.open("ab") as output:
            self._up = subprocess.Popen(
                [sys.executable, "-m", "invoke", *words],
                cwd=ROOT,
                env=os.environ | settings | {"STANDBY_DELAY_S": standby_delay_s},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        began = wait_until(lambda: run.programs("chief").exists() or self._up.poll(), START_S)
        if not began or not run.programs("chief").exists():
            raise RunFailed(f"{name} does not start; see {log}")
        return run

    def _resume(self, run: RunFolder, case: Case, standby_delay_s: str) -> None:
        """Resume a run that a fault has ended as intended."""
        options = f"--resume={run.name}", f"--runtime={case.runtime}", "--tensorboard-port=0", "--detach"
        self._start(run.name, ("up", *options), standby_delay_s)


def _kinds(run: RunFolder, case: Case, *, resumed: bool) -> set[str]:
    """Return the kinds of faults that a run survives, or can be resumed after."""
    injector = registry.find_runtime(run).injector(run)
    kinds = {*injector.storm, volleys.AGENT}
    if resumed and not case.result:
        kinds.add("stop")
        with contextlib.suppress(UsageError):  # this run has no separate, small disk
            injector.check("diskfull", "chief")
            kinds.add("diskfull")
    if case.result or not case.repeats:
        kinds -= {"corrupt"}  # it costs steps that others cannot repeat
    return kinds


def _resumable(run: RunFolder, injection: Injection) -> bool:
    """Whether a run ended as its newest run-ending fault requires; it is then resumed once."""
    summary, kind = run.load_summary(), injection.take_ending()
    if summary is None:
        return False
    if kind == "stop":
        return summary.state == "stopped"
    return kind == "diskfull" and summary.failure is not None and "the disk is full" in str(summary.failure.error)


def _end(run: RunFolder, timeout_s: float) -> str:
    """Wait for a run's end and kill what is left of it; return why it did not succeed, or an empty string."""
    if not wait_until(run.load_summary, timeout_s):
        states = ", ".join(f"{name} {beat.state}" for name, beat in run.heartbeats().items())
        _kill(run)
        return f"not over: generation {run.generation}, step {run.newest_step}, {states}"
    summary = run.load_summary()
    assert summary is not None
    _kill(run)
    if summary.state == "succeeded":
        return ""
    return f"{summary.state}: {cause.task}: {cause.error}" if (cause := summary.failure) else summary.state


def _kill(run: RunFolder) -> None:
    def sh(command: str) -> None:
        if (done := processes.run(["sh", "-c", command], KILL_S))[0]:
            raise RunFailed(f"{command}: {done[2]}")

    registry.find_runtime(run).remove(run, sh, 1)


def _result(run: RunFolder, case: Case) -> str:
    if case.result:
        return hashlib.sha256((run.path / case.result).read_bytes()).hexdigest()
    return str(getattr(run.load_summary(), "weights_sha256", None))


def _in_words(row: Row) -> str:
    faults = counted(sum(row["kinds"].values()), "fault")
    lost = f"lost: {row['lost']}" if row["lost"] else "succeeded"
    return f"{row['case']} {row['seed']}: {faults}, {lost}, bits {row['bits']}, {row['seconds']:.0f} s"
