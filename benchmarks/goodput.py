"""Goodput of our runs, and of peers that restart by themselves, if a program is killed at regular intervals.

Goodput is the share of time spent on steps that count: the steps done in a window, times the time per undisturbed step,
over the length of the window (runtime goodput, arXiv:2502.06982). Undisturbed steps are timed before the first kill and
after the last restart, since the speed of a shared machine drifts within ten minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers
from benchmarks.figures import Figure
from benchmarks.peers import Peer
from benchmarks.runs import ENDLESS, LIMIT_S, Bench
from cluster.contract.recovery import standby_cluster
from cluster.contract.run import records
from cluster.contract.run.launch_records import Programs
from cluster.host.launch import teardown
from cluster.system.errors import RunFailed
from cluster.system.processes import ProcessTable
from cluster.system.waiting import wait_until

EVERY_S = (5.0, 15.0, 60.0)
WINDOW_S, QUICK_S = 600.0, 40.0
CALM_S = 60.0
"""Seconds of training before the window, and again after it, to measure the time per step."""
WAITING = (
    "--model=benchmarks.own_models:waiting",
    "--dataset=benchmarks.own_models:rows",
    "--epochs=1000000",
    "--steps-per-loop=5",
    "--log-every=5",
)
"""Steps that leave the processor idle, as those on a GPU do."""
OURS: dict[str, tuple[str, ...]] = {"tf-cluster": (), "tf-cluster, steps that wait 50 ms": WAITING}
"""Our variants, with their overrides."""


def measure(bench: Bench) -> list[Figure]:
    """Kill programs of two tasks at each interval."""
    others = [peer for peer in peers.PEERS if bench.peers and peer.python]
    figures = []
    for every_s in EVERY_S:
        shares: dict[str, list[float]] = {how: [] for how in (*OURS, *(peer.title for peer in others))}
        for turn in bench.turns():
            name = f"goodput-{every_s:g}-{turn}"
            for number, (how, overrides) in enumerate(OURS.items()):
                with _ours(bench, f"{name}-{number}", overrides) as training:
                    shares[how].append(_goodput(training, every_s, _window_s(bench)))
            for peer in others:
                with _other(bench, peer, bench.folder / f"{name}-{peer.module}") as training:
                    shares[peer.title].append(_goodput(training, every_s, _window_s(bench)))
            bench.log(f"    {every_s:g} s: {', '.join(f'{how} {found[-1]:.2f}' for how, found in shares.items())}")
        title = f"goodput of two tasks, one of which is killed every {every_s:g} s for {_window_s(bench):g} s"
        figures.append(Figure(f"goodput-{every_s:g}", title, "of the time", shares))
    return figures


def _window_s(bench: Bench) -> float:
    return QUICK_S if bench.quick else WINDOW_S


class _Training:
    """A training of two tasks in the background."""

    def __init__(
        self, newest_step: Callable[[], int], programs: Callable[[], list[int]], is_settled: Callable[[], bool]
    ) -> None:
        """`programs`: the ids of the processes that train now; `is_settled`: whether nothing else uses the cores."""
        self.newest_step, self._programs, self._is_settled = newest_step, programs, is_settled

    def steps_per_s(self) -> float:
        """Return the speed of undisturbed steps, once the training does any."""
        reached = self.newest_step()
        if not wait_until(lambda: self.newest_step() > reached and self._is_settled(), LIMIT_S):
            raise RunFailed("a training for the goodput does no step, or its standby processes do not become ready")
        first, began = self.newest_step(), time.monotonic()
        time.sleep(CALM_S)
        return (self.newest_step() - first) / (time.monotonic() - began)

    def kill(self, dice: random.Random) -> None:
        """Kill one of the programs, if there is one at this moment."""
        if pids := self._programs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(pids), signal.SIGKILL)


def _goodput(training: _Training, every_s: float, window_s: float) -> float:
    dice = random.Random(every_s)  # noqa: S311  # not for cryptography
    before = training.steps_per_s()
    first, began = training.newest_step(), time.monotonic()
    for number in range(int(window_s / every_s)):
        time.sleep(max(0.0, began + (number + 0.5) * every_s - time.monotonic()))
        training.kill(dice)
    time.sleep(max(0.0, began + window_s - time.monotonic()))
    done, lasted_s = training.newest_step() - first, time.monotonic() - began
    undisturbed = (before + training.steps_per_s()) / 2
    return done / undisturbed / lasted_s


@contextmanager
def _ours(bench: Bench, name: str, overrides: tuple[str, ...]) -> Iterator[_Training]:
    run = bench.up(name, "--workers=1", "--detach", steps=ENDLESS, overrides=overrides)

    def programs() -> list[int]:
        found = [records.read_record(run.programs(task), Programs.from_json, None) for task in ("chief", "worker-0")]
        return [each.program.pid for each in found if each]

    def is_settled() -> bool:
        # Until they are ready, standby processes take a part of the cores.
        return standby_cluster.is_complete(run, run.load_cluster(), run.generation)

    # The heartbeats of programs that start again begin with step 0.
    try:
        yield _Training(lambda: max((row["step"] for row in run.rows("chief")), default=0), programs, is_settled)
        if run.summary.exists():
            raise RunFailed(f"{name} ended before its window did")
    finally:
        teardown.remove_run(run, lambda command: bench.call(["bash", "-c", command]), grace_s=0)


@contextmanager
def _other(bench: Bench, peer: Peer, folder: Path) -> Iterator[_Training]:
    folder.mkdir()
    rows = folder / "rows.jsonl"
    environment = {"PET_MAX_RESTARTS": "100000", "PET_MONITOR_INTERVAL": "0.1"}  # torchrun's options
    fastest = [setting for setting in peer.settings(2) if "--threads=1" in setting.words][-1]
    with rows.open("ab") as output:
        command, variables = peer.training_command(bench, 2, ENDLESS, fastest, f"--state={folder}")
        process = subprocess.Popen(command, env=os.environ | variables | environment, stdout=output, stderr=output)

    def newest_step() -> int:
        lines = [line for line in rows.read_text().splitlines() if line.startswith('{"step"')]
        return max((json.loads(line)["step"] for line in lines), default=0)

    try:
        yield _Training(newest_step, lambda: _workers(process.pid), lambda: True)
    finally:
        table = ProcessTable()
        for pid in (process.pid, *table.descendants(process.pid)):
            table.kill(pid)
        process.wait()


def _workers(pid: int) -> list[int]:
    """Return the processes that train among the descendants of torchrun or of a driver of Ray."""
    return sorted(each for each in ProcessTable().descendants(pid) if _trains(each))


def _trains(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"TrainWorker" in command or b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False
