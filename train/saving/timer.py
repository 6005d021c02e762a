"""Decides when a checkpoint is due: after a number of steps or seconds, or at the optimal interval.

`auto` is the optimal interval of J. W. Young, A first order approximation to the optimum checkpoint interval, CACM
1974, in the higher order of J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
FGCS 2006, for the cost of saves in this run and the time between its failures. This module does not import TensorFlow.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import UsageError

AUTO = "auto"
LEAST_SECONDS = 0.1

CALM_MTBF_S = 3600.0
"""Assumed mean time between failures of a run that has had none."""
EXPECTED_COST_S = 0.05
"""Assumed cost of the first save."""
MOST_S = 600.0
"""Longest `auto` interval, unless saves are too expensive even for that."""
MOST_SHARE = 0.1
"""Share of the time that saves may cost before the interval grows beyond `MOST_S`."""
RECENT = 5
"""Number of recent failures and saves taken into account, because both change during a run."""


def parse_interval(every: int | str) -> tuple[int, float]:
    """Return the steps and the seconds between two checkpoints; one of them is 0, both for `auto`.

    Raises UsageError for anything but `auto`, steps from 1 such as 200, and seconds from 0.1 such as 30s.
    """
    if every == AUTO:
        return 0, 0.0
    if re.fullmatch(r"[0-9]+", str(every)) and 1 <= int(every) <= 10**9:
        return int(every), 0.0
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)s", str(every))
    if not match or not LEAST_SECONDS <= float(match[1]) < math.inf:
        raise UsageError(
            f"--checkpoint-every {every!r}: expected optimizer steps from 1 to 1000000000 such as 200, seconds from "
            "0.1 such as 30s, or auto"
        )
    return 0, float(match[1])


def best_interval_s(cost_s: float, writing_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two saves that minimize the lost time.

    A save blocks training for `cost_s`; writing it takes `writing_s` concurrently, which is the minimum interval.
    """
    best = mtbf_s
    if 0 < cost_s < 2 * mtbf_s:
        ratio = cost_s / (2 * mtbf_s)
        best = math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
    return max(min(best, max(MOST_S, cost_s / MOST_SHARE)), writing_s, LEAST_SECONDS)


@dataclass(frozen=True)
class Past:
    """Failures and saves of a run's previous generations. A failure that needed no checkpoint does not count."""

    uptimes_s: tuple[float, ...] = ()
    """Training time of each generation that a failure ended, oldest first."""
    failed: bool = False
    """Whether this generation follows a failure."""
    stuck: bool = False
    """Whether the previous generation, which failed, finished no checkpoint."""
    cost_s: float | None = None
    writing_s: float | None = None

    @classmethod
    def read(cls, run: RunFolder, generation: int, first: int) -> Past:
        """Read the generations before this one, which starts at step `first`, from a run folder."""
        ledgers = run.ledgers()
        failed = {begun.generation for begun in run.generations() if begun.task}
        failed -= {ledger.generation for ledger in ledgers if ledger.restored_from == "memory"}
        earlier = [ledger for ledger in ledgers if ledger.generation < generation]
        numbers = [ledger.generation for ledger in earlier] + [generation]
        ended = [
            ledger
            for ledger, following in zip(earlier, numbers[1:], strict=True)
            if ledger.first_step_at and failed & set(range(ledger.generation + 1, following + 1))
        ]
        saves = next((ledger.saves for ledger in reversed(earlier) if ledger.saves), {})
        return cls(
            uptimes_s=tuple(sum(ledger.seconds.values()) for ledger in ended),
            failed=generation in failed,
            stuck=generation in failed and bool(earlier) and earlier[-1].first >= first,
            cost_s=saves.get("cost_s"),
            writing_s=saves.get("writing_s"),
        )


class SaveTimer:
    """Decides when the next checkpoint is due, only by the chief's clock, because clocks differ."""

    def __init__(
        self,
        every: int | str,
        past: Past | None = None,
        *,
        call_s: float = math.inf,
        writing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the interval: steps, seconds such as `30s`, or `auto`.

        `past` has previous generations, None for a task that does not decide; calls should not take longer than
        `call_s` seconds; `writing` returns whether the last checkpoint is still being written, and `clock` the time.
        """
        steps, self._seconds = parse_interval(every)
        self._past = past or Past()
        self._decides = past is not None and not steps
        self._writing, self._clock, self._call_s = writing, clock, call_s
        self._began_s: float | None = None
        self._counted_from_s = self._first_step_s = 0.0
        self._step_s: float | None = None
        self._costs_s: deque[float] | None = None
        self._writing_s = 0.0
        self._catches_up = self._past.failed if every == AUTO else self._past.stuck

    def due(self, steps: int) -> bool:
        """Whether a checkpoint is due after `steps` further steps, rather than after twice as many."""
        if self._catches_up:
            return True
        if not self._decides or self._began_s is None:
            return False
        elapsed_s, call_s = self._clock() - self._counted_from_s, steps * (self._step_s or 0.0)
        if self._writing() and elapsed_s + call_s < (self._writing_s or self._past.writing_s or math.inf):
            return False
        return elapsed_s + 1.5 * call_s >= self._interval_s

    def brief(self, steps: int) -> bool:
        """Whether calls should be shorter than `steps` steps, which take longer than the save interval or `call_s`."""
        if self._step_s is None and self._decides and self._past.failed:
            return True
        longest_s = min(self._call_s, self._interval_s if self._decides else math.inf)
        return steps * (self._step_s or self._first_step_s) > longest_s

    @property
    def waits(self) -> bool:
        """Whether to wait until the checkpoint is on the disk, because the last generation did not finish one."""
        return self._catches_up and self._past.stuck

    @property
    def saves(self) -> dict[str, float | None]:
        """The interval and its parameters, for the run folder; the interval is None if it is in steps."""
        interval_s = round(self._interval_s, 3) if self._decides else None
        writing_s = self._writing_s or self._past.writing_s
        return {"every_s": interval_s, "cost_s": round(self._cost_s, 4), "writing_s": writing_s}

    def stepped(self, steps: int, seconds: float, *, compiled: bool) -> None:
        """Record the newest steps, their total seconds, and whether these include tracing and compiling."""
        if self._began_s is None:
            self._began_s = self._counted_from_s = self._clock()
        self._first_step_s = self._first_step_s or seconds  # no step takes longer than the one that compiles
        if not compiled:
            self._step_s = seconds / steps

    def saved(self, cost_s: float = 0.0, writing_s: float | None = None) -> None:
        """Restart the interval after a checkpoint, for which training waited `cost_s`.

        `writing_s` is how long the last finished one took to write, concurrently with the training.
        """
        if self._costs_s is None:
            self._costs_s = deque(maxlen=RECENT)  # the first save of a generation also creates the copy
        else:
            self._costs_s.append(cost_s)
        self._writing_s = self._writing_s if writing_s is None else writing_s
        self._catches_up = False
        self._counted_from_s = self._clock()

    @property
    def _interval_s(self) -> float:
        uptime_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        recent = self._past.uptimes_s[-RECENT:]
        mtbf_s = (sum(recent) + uptime_s) / len(recent) if recent else max(CALM_MTBF_S, uptime_s)
        return self._seconds or best_interval_s(self._cost_s, self._writing_s, mtbf_s)

    @property
    def _cost_s(self) -> float:
        if self._costs_s:
            return median_low(self._costs_s)
        return EXPECTED_COST_S if self._past.cost_s is None else self._past.cost_s
