"""Who is slower than the others and who waits for input; and what a generation's steps leave of themselves."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.contract.results import stragglers
from cluster.contract.run.records import Pace
from train.telemetry.step_timer import KEPT, RECENT, StepTiming, Times, times_from_marks


def pace(busy_ms: float, input_ms: float = 0.0, step_ms: float = 200.0) -> Pace:
    """Return the pace of a task that is busy that long in each of its steps."""
    return Pace(
        steps=stragglers.FEWEST, step_ms={"mean": step_ms}, busy_share=busy_ms / step_ms, input_share=input_ms / step_ms
    )


FEW = replace(pace(190, 90), steps=stragglers.FEWEST - 1)
SILENT = Pace(steps=stragglers.FEWEST, step_ms={"mean": 900.0})


@pytest.mark.parametrize(
    ("paces", "expected"),
    [
        (
            {"chief": pace(100, 2), "worker_0": pace(104, 2), "worker_1": pace(182, 59)},
            ["worker-1 is 1.8x slower, 71 % of it in input"],
        ),
        ({"chief": pace(100, 10), "worker_0": pace(190, 10)}, ["worker-0 is 1.9x slower, 0 % of it in input"]),
        ({"chief": pace(100, 1), "worker_0": pace(190, 90)}, ["worker-0 is 1.9x slower, 99 % of it in input"]),
        (
            {"chief": pace(100, 40), "worker_0": pace(105, 50), "worker_1": pace(100, 19)},
            ["worker-0 waits 25 % of the time for input", "chief waits 20 % of the time for input"],
        ),
        ({"chief": pace(100), "worker_0": pace(124)}, []),
        ({"chief": pace(100), "worker_0": pace(126)}, ["worker-0 is 1.3x slower, 0 % of it in input"]),
        ({"chief": pace(0.5, step_ms=2), "worker_0": pace(1.2, step_ms=2)}, []),  # chance
        # The others are judged by their median: one that is much faster makes nobody slow.
        ({"chief": pace(20), "worker_0": pace(100), "worker_1": pace(101), "worker_2": pace(103)}, []),
        *(({"chief": pace(100), "ps_0": silent}, []) for silent in (Pace(), SILENT, FEW)),
        ({"chief": pace(150)}, []),
    ],
)
def test_who_is_slower_and_who_waits_for_input(paces, expected):
    named = {name.replace("_", "-"): each for name, each in paces.items()}
    assert expected == stragglers.lines(stragglers.findings(named))


TWO_STEPS = [("begin", 0.0), ("batch", 1.0), ("computed", 4.0), ("begin", 6.0), ("batch", 6.5), ("computed", 9.0)]
PARTS = [("batch", 1.0), ("asks", 2.0), ("batch", 2.5), ("asks", 6.0), ("batch", 6.25), ("computed", 8.0)]
EARLY = [("batch", 0.5), ("computed", 4.0), ("asks", 6.0), ("batch", 7.5)]


@pytest.mark.parametrize(
    ("marks", "steps", "inputs", "busy"),
    [
        ([*TWO_STEPS, ("begin", 10.0)], [6.0, 4.0], [1.0, 0.5], [4.0, 3.0]),
        # A step that was not marked whole only ends the one before.
        ([*TWO_STEPS[:3], ("begin", 3.0), ("begin", 50.0)], [3.0], [1.0], [4.0]),
        ([("begin", 0.0), ("begin", 1.0)], [], [], []),
        ([("begin", 0.0), *PARTS, ("begin", 9.0)], [9.0], [1.75], [8.0]),  # each part of a batch is waited for
        # A batch that is asked for one step early keeps the task busy.
        ([("begin", 0.0), *EARLY, ("begin", 8.0)], [8.0], [2.0], [5.5]),
    ],
)
def test_marks_distinguish_the_steps(marks, steps, inputs, busy):
    times = times_from_marks(marks)
    assert (steps, inputs, busy) == tuple(part.tolist() for part in (times.steps, times.inputs, times.busy))
    assert not steps or pytest.approx(sum(inputs) / sum(steps)) == times.input_share


def test_the_heartbeat_reports_the_newest_steps_and_the_summary_of_all():
    seen = StepTiming()
    seen.add(Times(np.array([9.0]), np.array([3.0]), np.array([6.0])))
    for _ in range(RECENT):
        seen.add(Times(np.array([0.1]), np.array([0.01]), np.array([0.05])))
    assert {"mean": 100.0, "median": 100.0, "p90": 100.0, "max": 100.0} == seen.recent()["step_ms"]
    assert (0.1, 0.5) == (seen.recent()["input_share"], seen.recent()["busy_share"])
    whole = seen.generation()
    assert (RECENT + 1, 9000.0, 100.0) == (whole.steps, whole.step_ms["max"], whole.step_ms["p50"])
    assert whole.input_share > 0.15


def test_however_many_steps_a_generation_has_the_newest_are_kept():
    seen = StepTiming()
    for first in range(0, 3 * KEPT, 7):
        seen.add(Times(np.arange(first, first + 7) / 1000))
    pace, last = seen.generation(), first + 6
    assert (last + 1, last, last - (KEPT - 1) / 2) == (pace.steps, pace.step_ms["max"], pace.step_ms["p50"])


def test_what_a_task_cannot_distinguish_is_none_as_is_anything_before_its_first_step():
    seen = StepTiming()
    assert ({}, Pace()) == (seen.recent(), seen.generation())
    seen.add(Times(np.array([0.1, 0.3])))
    assert (None, None) == (seen.recent()["input_share"], seen.generation().busy_share)
