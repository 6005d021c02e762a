"""Breakdown of the step time of two tasks with one core each, to explain why they are not twice as fast as one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.figures import Figure
from benchmarks.marked import COMPUTED, SUMMED
from benchmarks.runs import Bench
from benchmarks.scaling import ONE, SAME_SHARE, own_cores, start
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import supervisor

STEPS = 200
WARM_CALLS = 2
"""Number of calls of the loop to ignore at the start: the first compiles."""

Call = Mapping[str, Sequence[float]]
"""Times at which each step of a call was `computed` and `summed`, see `marked.py`."""


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a step, as means over steps and tasks; they add up to the whole step."""

    own: float
    """From the previous sum to the task's own gradients: update, batch, forward and backward."""
    slower: float
    """Waiting for the gradients of the other task."""
    exchange: float
    """From the last gradients of any task to the sum."""
    between: float
    """A step's share of the time between calls of the loop, for reports and requests."""


def measure(bench: Bench) -> list[Figure]:
    """Train a chief alone and a chief with a worker, alternately.

    Raises:
        PrerequisiteError: there are fewer than two cores.
    """
    found: dict[str, list[Parts]] = {SAME_SHARE: [], ONE: []}
    for turn in bench.turns():
        for name, workers in ((ONE, 0), (SAME_SHARE, 1)):
            run = start(bench, f"exchange-{turn}-{workers}", workers, 1 + workers, own_cores("exchange"), marked=True)
            try:
                bench.await_step(run, bench.steps(STEPS))
                found[name].append(parts([_calls(run, task.name) for task in run.load_cluster().tasks]))
            finally:
                supervisor.kill_run(run)
    titles = {
        "own": "a task computes its own gradients",
        "slower": "a task waits for the gradients of the other",
        "exchange": "gradients are exchanged and added up",
        "between": "the loop is left and called again, every 25 steps",
    }
    return [
        Figure(
            f"exchange-{part}",
            f"part of a step in which {title}, one core a task",
            "ms",
            {name: [getattr(each, part) for each in samples] for name, samples in found.items()},
        )
        for part, title in titles.items()
    ]


def parts(tasks: Sequence[Sequence[Call]]) -> Parts:
    """Return the parts of a step from the calls of each task."""
    own, slower, exchange, between, steps = [], [], [], 0.0, 0
    for before, now in _pairs(tasks):
        for step in range(1, len(now[0][COMPUTED])):
            last = max(call[COMPUTED][step] for call in now)
            own += [call[COMPUTED][step] - call[SUMMED][step - 1] for call in now]
            slower += [last - call[COMPUTED][step] for call in now]
            exchange += [call[SUMMED][step] - last for call in now]
        gaps = [call[COMPUTED][0] - old[SUMMED][-1] for call, old in zip(now, before, strict=True)]
        between += fmean(gaps) - fmean(own)
        steps += len(now[0][COMPUTED])
    found = (fmean(own), fmean(slower), fmean(exchange), between / steps)
    return Parts(*(1000 * seconds for seconds in found))


def _pairs(tasks: Sequence[Sequence[Call]]) -> list[tuple[list[Call], list[Call]]]:
    """Return each counted call of all tasks, paired with the call before it."""
    calls = [list(of_tasks) for of_tasks in zip(*tasks, strict=False)]  # one task may be a call ahead
    return list(zip(calls[WARM_CALLS - 1 :], calls[WARM_CALLS:], strict=False))


def _calls(run: RunFolder, task: str) -> list[Call]:
    lines = (run.path / "marks" / f"{task}.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
