"""Time from the command to the first finished step of a chief and one worker, with data and images prepared."""

from __future__ import annotations

import time

from benchmarks import peers
from benchmarks.figures import Figure, Goal, ratios
from benchmarks.runs import LIMIT_S, POLL_S, Bench
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import teardown
from cluster.host.runtime import warm
from cluster.system.errors import TimedOut

OURS, SCRIPT = "up", "hand-written loop, both started at once"


def measure(bench: Bench) -> list[Figure]:
    """Start each in turn."""
    others = peers.chosen(bench)
    processes: dict[str, list[float]] = {OURS: [], SCRIPT: [], **{each.title: [] for each in others}}
    again: list[float] = []
    containers: list[float] = []
    if bench.engine:
        until_first_step(bench, "warm-up", 1, "docker")  # builds the images if they are missing
    for turn in bench.turns():
        warm.end()
        processes[OURS].append(until_first_step(bench, f"start-{turn}", 1))
        began = time.time()
        processes[SCRIPT].append(bench.baseline("custom_loop", 1, 1)[0]["time"] - began)
        until_first_step(bench, f"start-before-{turn}", 1, keep_warm="15m")
        again.append(until_first_step(bench, f"start-again-{turn}", 1, keep_warm="15m"))
        for other in others:
            began = time.time()
            processes[other.title].append(other.run(bench, 2, 1, other.settings(2)[0])[0]["time"] - began)
        if bench.engine:
            containers.append(until_first_step(bench, f"start-docker-{turn}", 1, "docker"))
    found = [
        Figure(
            "start",
            "`up` to the first finished step, chief and 1 worker, local processes",
            "s",
            processes,
            ratios(processes[OURS], processes[SCRIPT]),
            goal=Goal(6.0, at_least=False),
        ),
        Figure(
            "start-warm",
            "`up --keep-warm 15m` to the first finished step, after another run",
            "s",
            {OURS: again, "without": processes[OURS]},
            goal=Goal(1.5, at_least=False),
        ),
    ]
    warm.end()
    if containers:
        title = "`up` to the first finished step, chief and 1 worker, containers"
        found.append(Figure("start-containers", title, "s", {OURS: containers}, goal=Goal(8.0, at_least=False)))
    return found


def until_first_step(bench: Bench, name: str, workers: int, runtime: str = "local", keep_warm: str = "") -> float:
    """Bring a cluster up and down again; return the seconds from the command to its first finished step."""
    words = [f"--workers={workers}", "--detach", *([f"--keep-warm={keep_warm}"] if keep_warm else [])]
    began = time.time()
    run = bench.up(name, *words, steps=100_000, runtime=runtime, STANDBY="0")
    seconds = _first_step(run) - began
    teardown.remove_run(run, lambda command: bench.call(["bash", "-c", command]), grace_s=0)
    if runtime == "docker":
        teardown.remove_run(run, lambda command: bench.call(["bash", "-c", command]))
    return seconds


def _first_step(run: RunFolder) -> float:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for event in run.events():
            if event.event == "first step":
                return float(event.time)
        time.sleep(POLL_S)
    raise TimedOut(f"{run.name} reports no first step")
