"""Begin and end of the computations of a task's stages, measured by marks inside the graph in some of the steps.

A mark reads Python's clock, because TensorFlow's clock cannot be read in a deterministic process. In a marked step a
computation waits for the mark before it, which costs about 50 us and does not change bits. On a GPU marks only show
when a computation was requested.

TensorFlow regards a mark as a function without effects: stateful operations of a graph run one after the other, which
would make the stages of one process wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from train.pipeline.schedule import Instruction, Span

EVERY = 8
"""Interval between calls of the loop whose last step is marked; of the first calls, numbers 1, 2 and 4 are."""


def marks_call(number: int) -> bool:
    """Whether the last step of call `number`, from 0, is marked; the first call compiles."""
    return number > 0 and (number & (number - 1) == 0 or number % EVERY == 0)


class Marks:
    """Collects the marks of a step."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, Instruction], float] = {}
        self._spans: list[Span] = []
        self._marked: tf.Tensor | None = None
        self._step: tf.Tensor | None = None

    def begin(self, marked: tf.Tensor, step: tf.Tensor) -> None:
        """Set, inside the graph, whether the traced step is marked, a bool scalar, and its number."""
        self._marked, self._step = marked, step

    def mark(self, stage: int, instruction: Instruction, after: Sequence[Any], *, ends: bool) -> tf.Tensor:
        """Record the time once `after` is computed, if the step is marked; return a tensor to wait for."""
        record = self._end if ends else self._begin

        def recorded() -> tf.Tensor:
            # Without an argument it would be a constant.
            call = _calling(record, stage, instruction)
            return tf.ensure_shape(tf.numpy_function(call, [self._step], tf.int32, stateful=False), [])

        with tf.device("CPU:0"), tf.control_dependencies(list(after)):
            assert self._marked is not None
            return tf.cond(self._marked, recorded, lambda: tf.constant(0))

    def take(self) -> list[Span]:
        """Return and clear the spans of the newest marked step's computations, in order."""
        spans, self._spans = self._spans, []
        return sorted(spans, key=lambda span: span.begin_s)

    def _begin(self, stage: int, instruction: Instruction) -> None:
        self._begun[stage, instruction] = time.time()

    def _end(self, stage: int, instruction: Instruction) -> None:
        self._spans.append(Span(stage, instruction, self._begun.pop((stage, instruction)), time.time()))


def _calling(record: Callable[[int, Instruction], None], stage: int, instruction: Instruction) -> Callable[..., Any]:
    nothing = np.zeros((), np.int32)

    def call(_step: np.ndarray) -> np.ndarray:
        record(stage, instruction)
        return nothing

    return call
