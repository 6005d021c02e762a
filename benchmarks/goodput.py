"""Goodput under kills: a task's program is killed at regular intervals, with snapshots in memory and without.

Goodput is the share of the time in which steps were done that count: the steps done in a window, times the time that a
step took before the first kill, over the length of the window (runtime goodput, arXiv:2502.06982).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

from benchmarks.figures import Figure, ratios
from benchmarks.runs import ENDLESS, Bench
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Programs
from cluster.host.launch import teardown

EVERY_S = (5.0, 15.0, 60.0)
WINDOW_S, QUICK_S = 600.0, 40.0
CALM_S = 30.0
"""Training before the window: standby processes are there, and the time of a step is known."""
MEMORY, DISK = "with snapshots in memory", "checkpoints alone"
WORDS = {MEMORY: (), DISK: ("--no-memory-snapshots",)}


def measure(bench: Bench) -> list[Figure]:
    """Kill programs of a chief and a worker at each interval."""
    found: dict[float, dict[str, list[float]]] = {every_s: {how: [] for how in WORDS} for every_s in EVERY_S}
    for number in bench.turns():
        for every_s, shares in found.items():
            for how, words in WORDS.items():
                shares[how].append(_goodput(bench, f"goodput-{number}-{every_s:g}-{len(words)}", words, every_s))
    return [
        Figure(
            f"goodput-{every_s:g}",
            f"goodput of a chief and a worker, a kill every {every_s:g} s for {_window_s(bench):g} s",
            "of the time",
            shares,
            ratios(shares[MEMORY], shares[DISK]),
        )
        for every_s, shares in found.items()
    ]


def _window_s(bench: Bench) -> float:
    return QUICK_S if bench.quick else WINDOW_S


def _goodput(bench: Bench, name: str, words: tuple[str, ...], every_s: float) -> float:
    run = bench.up(name, "--workers=1", "--detach", *words, steps=ENDLESS)
    dice = random.Random(name)  # noqa: S311  # not for cryptography
    first, began = run.newest_step, time.monotonic()
    time.sleep(CALM_S)
    step_s = (time.monotonic() - began) / (run.newest_step - first)
    first, began = run.newest_step, time.monotonic()
    due = began + every_s
    while due < began + _window_s(bench):
        time.sleep(max(0.0, due - time.monotonic()))
        _kill(run, dice.choice(["chief", "worker-0"]))
        due += every_s
    time.sleep(max(0.0, began + _window_s(bench) - time.monotonic()))
    share = (run.newest_step - first) * step_s / (time.monotonic() - began)
    teardown.remove_run(run, lambda command: bench.call(["bash", "-c", command]), grace_s=0)
    return share


def _kill(run: RunFolder, task: str) -> None:
    """Kill a task's program, if it has one at this moment."""
    programs = records.read_record(run.programs(task), Programs.from_json, None)
    if programs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(programs.program.pid, signal.SIGKILL)
