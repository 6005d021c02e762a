"""The outer loop: calls the inner loop repeatedly and does the periodic work between two calls."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np

from cluster.system.errors import RunFailed
from train.loops.steps import LoopResult
from train.saving.checkpoint import diverged
from train.saving.timer import following_steps

Inner = Callable[[int, int, bool], LoopResult]
"""Does optimizer steps: (steps done before, steps to do, whether this task must stop) -> result."""


@dataclass(frozen=True)
class Every:
    """Periodic work: `action(step)` whenever `steps` more optimizer steps are done.

    An action that returns True ends the training; it must do so in all tasks at the same step.
    """

    steps: int
    action: Callable[[int], object]

    def next(self, step: int) -> int:
        """Return the first step after `step` at which the action is due."""
        return (step // self.steps + 1) * self.steps

    def due(self, step: int) -> bool:
        """Whether the action is due after `step`."""
        return step % self.steps == 0


@dataclass(frozen=True)
class EveryEpoch:
    """Periodic work: `action(step)` whenever an epoch ends; otherwise like `Every`."""

    next: Callable[[int], int]
    """Steps done -> steps done at the end of their epoch."""
    action: Callable[[int], object]

    def due(self, step: int) -> bool:
        """Whether the action is due after `step`."""
        return self.next(step - 1) == step


Periodic = Every | EveryEpoch


@dataclass(frozen=True)
class Progress:
    """The newest optimizer steps."""

    first: int
    """Steps done before them."""
    result: LoopResult
    seconds: float
    compiled: bool
    """Whether their time includes tracing and compiling."""

    @property
    def step(self) -> int:
        """Steps done after them."""
        return self.first + len(self.result.losses)


def run(
    inner: Inner,
    first: int,
    total: int,
    *,
    steps_per_loop: int,
    every: Sequence[Periodic],
    report: Callable[[Progress], None],
    stop: Callable[[], bool],
    save: Callable[[int], None],
    single: range = range(0),
) -> tuple[int, bool]:
    """Train from step `first` to step `total`.

    The number of steps of an inner call follows from the step and from signals that all tasks share, so all tasks make
    the same calls.

    Args:
        every: periodic work. None is done after the last step, where the caller does its final work.
        report: called after every inner call.
        save: saves a checkpoint after the periodic work of a step, if a task requests one before training ends.
        single: steps after each of which the inner loop is called for a single step.

    Returns:
        The steps done, and whether training was stopped before `total`, other than by an action.

    Raises:
        RunFailed: a loss was not finite; the message names the step.
    """
    step, most = first, 1  # the first call compiles: keep it short
    while step < total:
        until = min([total, step + (1 if step in single else most), *(periodic.next(step) for periodic in every)])
        if step < single.start < until:
            until = single.start
        began = time.perf_counter()
        result = inner(step, until - step, stop())
        progress = Progress(step, result, time.perf_counter() - began, compiled=step == first)
        _check_finite(progress)
        step, most = until, following_steps(most, steps_per_loop, brief=result.signals.brief)
        report(progress)
        if step < total:
            if result.signals.stop:
                return step, True
            ends = [periodic.action(step) is True for periodic in every if periodic.due(step)]
            if result.signals.save:
                save(step)
            if any(ends):
                return step, False
    return step, False


def _check_finite(progress: Progress) -> None:
    bad = np.flatnonzero(~np.isfinite(progress.result.losses))
    if bad.size:
        step = progress.first + int(bad[0]) + 1
        raise not_finite(progress.result.losses[bad[0]], step)


def not_finite(loss: float, step: int) -> RunFailed:
    """Return the error of a NaN or infinite loss."""
    return diverged(f"loss is {loss} at step {step}")


def weights_sha256(model: keras.Model) -> str:
    """Return the hash of the trainable variables' bytes in creation order."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()
