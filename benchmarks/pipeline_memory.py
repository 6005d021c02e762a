"""The peak memory of the first of four stages under each schedule, on however many cores."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import Figure, ratios
from benchmarks.pipeline import start
from benchmarks.runs import Bench
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import supervisor
from cluster.system.json_files import read_json

STAGES, MICRO_BATCHES = 4, 8
STEPS = 3
"""Every step takes the same memory."""
SCHEDULES = ("1f1b", "gpipe", "gpipe --remat")


def measure(bench: Bench) -> list[Figure]:
    """Train a few steps with each schedule in turn."""
    peaks: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for turn in bench.turns():
        for name, samples in peaks.items():
            order, *remat = name.split()
            run_name = f"memory-{turn}-{order}-{len(remat)}"
            run = start(bench, run_name, STAGES, MICRO_BATCHES, order, remat=bool(remat), batch=64, context=128)
            try:
                bench.await_step(run, STEPS)
                samples.append(_peak_mib(run))
            finally:
                supervisor.kill_run(run)
            bench.log(f"    {name}: {samples[-1]:.0f} MiB")
    title = (
        f"peak memory of stage 0 of {STAGES}, M={MICRO_BATCHES}: 1f1b, which holds {STAGES} micro-batches, over gpipe, "
        f"which holds {MICRO_BATCHES}"
    )
    return [Figure("pipeline-memory", title, "MiB", peaks, ratios(peaks["1f1b"], peaks["gpipe"]), "times")]


def _peak_mib(run: RunFolder) -> float:
    """Return the most memory that the first stage's process had at a time, TensorFlow's own included."""
    pid = read_json(run.programs("chief"))["program"]["pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
