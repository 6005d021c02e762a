"""Implements `invoke bench`: selects benchmarks, runs them and stores their results."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import peers as others
from benchmarks import results
from benchmarks.figures import Figure
from benchmarks.runs import DATASET, ROOT, Bench, bench
from cluster.host.launch import folders
from cluster.host.runtime import registry
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, PrerequisiteError, RunFailed, TimedOut, UsageError, nearest
from cluster.system.messages import counted, short_path

NAMES = ("start", "throughput", "scaling", "determinism", "telemetry", "input", "tasks", "recovery", "images")
"""Modules of this package with a function `measure`, in the order in which they are measured."""
ON_REQUEST = ("exchange", "elastic", "saving", "goodput", "pipeline", "gang", "own_models")
"""Further benchmarks, measured only if `--only` names them."""
NEEDS_ENGINE = ("images",)


def chosen(only: str) -> list[str]:
    """Return the requested benchmarks.

    Raises:
        UsageError: unknown benchmark.
    """
    known = (*NAMES, *ON_REQUEST)
    names = [name for name in only.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(f"--only: unknown benchmark {name!r}{nearest(name, known)}")
    return list(dict.fromkeys(names)) or list(NAMES)


def main(
    only: str, rounds: int, *, write: bool, quick: bool, peers: bool, runtime: str, log: Callable[[str], object]
) -> tuple[int, list[results.Row]]:
    """Measure, and store the results; return the exit code and the rows.

    If a benchmark fails, the others still run, and its earlier figures are kept.

    Args:
        only: names of benchmarks, separated by commas; empty: `NAMES`.
        rounds: number of rounds of each.
        write: whether to update the tables in the documents.
        quick: whether to only try everything, and store nothing.
        peers: whether to measure PyTorch and Ray, too.
        runtime: as for `up`; `local` excludes everything that needs an engine.
        log: receives lines of progress.

    Raises:
        UsageError: a name is unknown.
        PrerequisiteError: something is missing.
    """
    names = _possible(chosen(only), runtime, named=bool(only), log=log)
    check_plots()
    if peers:
        others.prepare(log)
    began, found = time.monotonic(), []
    under = results.conditions()
    with bench(rounds=rounds, quick=quick, runtime=runtime, peers=peers, log=log) as runs:
        runs.invoke("data.prepare", f"--name={DATASET}")
        failed = []
        for name in names:
            try:
                figures = _measure(name, runs)
            except (RunFailed, TimedOut) as error:  # continue with the others
                log(f"  {name} failed: {error}")
                failed.append(name)
                continue
            found += results.rows(figures, under)
            if not quick:  # at once, as a later benchmark may fail
                results.write(results.merge(results.read(), found))
    _draw(found, quick=quick, log=log)
    if write and not quick:
        log(f"renewed {' and '.join(results.renew(results.read()))}")
    log(f"{counted(len(found), 'figure')} in {time.monotonic() - began:.0f} s")
    if failed:
        log(f"failed, their earlier figures stay: {', '.join(failed)}")
    missed = [row["name"] for row in found if row["met"] is False]
    return EXIT_FAILED if failed or (missed and not quick) else EXIT_DONE, found


def check_plots() -> None:
    """Check that plots can be drawn.

    Raises:
        PrerequisiteError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PrerequisiteError(
            "matplotlib, which draws the plots, is not installed here; run `make bench`, which adds the test tools to "
            ".venv, or install requirements/dev.lock"
        )


def _possible(names: Sequence[str], runtime: str, *, named: bool, log: Callable[[str], object]) -> list[str]:
    """Return the benchmarks that can run here: without an engine, those that need it only if requested by name."""
    chosen, why = registry.choose_runtime(runtime)
    if chosen.name == "docker" or named:
        return list(names)
    for name in NEEDS_ENGINE:
        if name in names:
            log(f"{name}: left out, {why}")
    return [name for name in names if name not in NEEDS_ENGINE]


def _measure(name: str, runs: Bench) -> list[Figure]:
    began = time.monotonic()
    runs.log(name)
    figures: list[Figure] = importlib.import_module(f"benchmarks.{name}").measure(runs)
    for line in results.lines([figure.to_json() for figure in figures]):
        runs.log(f"  {line}")
    runs.log(f"  {time.monotonic() - began:.0f} s")
    return figures


def _draw(found: Sequence[results.Row], *, quick: bool, log: Callable[[str], object]) -> None:
    from benchmarks import plots

    if quick:
        with tempfile.TemporaryDirectory(prefix="bench-plots-") as folder:
            plots.show(found, plots.draw(found, Path(folder)), Path(folder))
        return
    kept = results.read()
    images = plots.draw(kept, ROOT / "benchmarks" / "plots")
    board = folders.runs_dir() / "bench" / "tensorboard"
    plots.show(kept, images, board)
    log(f"plots in benchmarks/plots/, and in TensorBoard from {short_path(board)}")


def stderr(line: str) -> None:
    """Print a line of progress to stderr, because a program may read stdout."""
    print(line, file=sys.stderr, flush=True)
