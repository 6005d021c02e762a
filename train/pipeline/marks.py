"""When the computations of a task's stages begin and end, by marks inside their graph, of few of the steps.

A mark reads Python's clock, because TensorFlow's own refuses to be read in a deterministic process. The computation of
a marked step waits for the mark before it, which costs some 50 us; its bits are the same. On a GPU marks only say when
a computation was requested.

To TensorFlow a mark is a function without effects: stateful operations of a graph run one after the other, which would
make the stages of one process wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from train.pipeline.schedule import Instruction, Span

EVERY = 8
"""Calls of the loop to one whose last step is marked; of the first ones every 1st, 2nd, 4th."""


def marks_call(number: int) -> bool:
    """Return whether the last step of a call is marked, counted from 0; the first call compiles."""
    return number > 0 and (number & (number - 1) == 0 or number % EVERY == 0)


class Marks:
    """Collects the marks of a step."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, Instruction], float] = {}
        self._spans: list[Span] = []
        self._marked: tf.Tensor | None = None
        self._step: tf.Tensor | None = None

    def begin(self, marked: tf.Tensor, step: tf.Tensor) -> None:
        """Say, inside the graph, whether the step that is traced is marked, a bool scalar, and its number."""
        self._marked, self._step = marked, step

    def mark(self, stage: int, instruction: Instruction, after: Sequence[Any], *, ends: bool) -> tf.Tensor:
        """Take the time once `after` is computed, if the step is marked; return a tensor to wait for."""
        note = self._end if ends else self._begin

        def noted() -> tf.Tensor:
            # With an argument: without one it would be a constant.
            call = _calling(note, stage, instruction)
            return tf.ensure_shape(tf.numpy_function(call, [self._step], tf.int32, stateful=False), [])

        with tf.device("CPU:0"), tf.control_dependencies(list(after)):
            assert self._marked is not None
            return tf.cond(self._marked, noted, lambda: tf.constant(0))

    def take(self) -> list[Span]:
        """Return what the newest marked step's computations took, in order, and forget it."""
        spans, self._spans = self._spans, []
        return sorted(spans, key=lambda span: span.begin_s)

    def _begin(self, stage: int, instruction: Instruction) -> None:
        self._begun[stage, instruction] = time.time()

    def _end(self, stage: int, instruction: Instruction) -> None:
        self._spans.append(Span(stage, instruction, self._begun.pop((stage, instruction)), time.time()))


def _calling(note: Callable[[int, Instruction], None], stage: int, instruction: Instruction) -> Callable[..., Any]:
    nothing = np.zeros((), np.int32)

    def call(_step: np.ndarray) -> np.ndarray:
        note(stage, instruction)
        return nothing

    return call
