"""The programs to compare with, each at its best setting: every setting is tried first, and the fastest is measured.

A setting changes a program's speed, not its results: threads, kernels, steps per call, how batches are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.baselines.common import EVERY
from benchmarks.figures import step_seconds
from benchmarks.runs import GLOBAL_BATCH, Bench, cores
from cluster.system.errors import RunFailed, TimedOut
from cluster.system.messages import counted

TRIAL_STEPS, FINALISTS = 100, 2
"""Steps of a trial, and number of fastest settings that are tried again; the fastest run counts."""
ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "1"}
"""As in our runs, even on processors for which TensorFlow leaves oneDNN off."""


@dataclass(frozen=True)
class Setting:
    """Options of a program, and variables of its environment."""

    name: str
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A program that trains the same model as ours."""

    title: str
    settings: Callable[[int], Sequence[Setting]]
    """Number of tasks -> settings; the first is that of the program's documentation."""
    run: Callable[[Bench, int, int, Setting], list[dict[str, Any]]]
    """(bench, tasks, steps, setting) -> rows logged by the first task of a training."""
    alone: bool = True
    """Whether it is measured on one task, too."""

    def rate(self, bench: Bench, tasks: int, steps: int, setting: Setting) -> float:
        """Return the examples/s of a training, which is repeated once if it fails.

        Raises:
            RunFailed, TimedOut: it fails again.
        """
        try:
            return rate(self.run(bench, tasks, steps, setting))
        except (RunFailed, TimedOut) as error:
            bench.log(f"    {self.title}, {setting.name}: {error}; again")
            return rate(self.run(bench, tasks, steps, setting))


def rate(rows: list[dict[str, Any]]) -> float:
    """Return the examples/s of a training from its rows."""
    return GLOBAL_BATCH / step_seconds(rows)


def fastest(bench: Bench, contender: Contender, tasks: int) -> tuple[Setting, dict[str, list[float]]]:
    """Try every setting of a program; return the fastest, and the examples/s of all trials by setting name."""
    settings = list(contender.settings(tasks))
    if bench.quick:
        return settings[0], {}
    tried: dict[str, list[float]] = {setting.name: [] for setting in settings}
    for again in (False, True):
        settings.sort(key=lambda setting: -max(tried[setting.name], default=0.0))
        for setting in settings[: FINALISTS if again else None]:
            tried[setting.name].append(contender.rate(bench, tasks, TRIAL_STEPS, setting))
    for name, rates in tried.items():
        bench.log(f"    {contender.title}, {name}: {', '.join(f'{each:,.0f}' for each in rates)} examples/s")
    return max(settings, key=lambda setting: max(tried[setting.name])), tried


def threads(tasks: int) -> list[int]:
    """Return the numbers of threads per task to try: a task's share of the cores, and all of them."""
    return sorted({max(1, cores() // tasks), cores()})


def _loop_settings(tasks: int) -> list[Setting]:
    return _tutorial_settings(tasks, "oneDNN", "a call", "--steps-per-call")


def _fit_settings(tasks: int) -> list[Setting]:
    return _tutorial_settings(tasks, "oneDNN, no XLA", "an execution", "--steps-per-execution", "--no-jit")


def _tutorial_settings(tasks: int, kernels: str, of: str, option: str, *words: str) -> list[Setting]:
    """Return a tutorial's setting, and one for each number of threads with one and with several steps per call."""
    settings = [Setting("as in the tutorial")]
    for count in threads(tasks):
        for steps in (1, EVERY):
            name = f"{kernels}, {counted(count, 'thread')}, {counted(steps, 'step')} {of}"
            settings.append(Setting(name, (*words, f"--threads={count}", f"{option}={steps}"), ONEDNN))
    return settings


def _script(name: str) -> Callable[[Bench, int, int, Setting], list[dict[str, Any]]]:
    def run(bench: Bench, tasks: int, steps: int, setting: Setting) -> list[dict[str, Any]]:
        return bench.baseline(name, tasks - 1, steps, *setting.words, **setting.environment)

    return run


LOOP = Contender("hand-written loop", _loop_settings, _script("custom_loop"))
FIT = Contender("Keras fit", _fit_settings, _script("keras_fit"))
