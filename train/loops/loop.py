"""The loop of a training: calls of many optimizer steps, and actions before and after each call.

`--loop custom` runs it with `Loop.run`. Keras's `fit` runs the steps itself, and its callback calls `begin_call` and
`end_call` (`train/loops/fit.py`), so that both loops have the same actions (`train/loops/actions.py`).
"""

import enum
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from train.loops.steps import LoopResult, Request

Steps = Callable[[int, int, Request], LoopResult]
"""A function that does optimizer steps: (steps done before, steps to do, requests of this task) -> result."""


class Stop(enum.Enum):
    """Reason to stop training."""

    END = "end"
    """The last step is done, or a callback ends the training."""
    REQUESTED = "requested"
    """A task must stop; the run can be resumed."""


@dataclass(frozen=True)
class CallProgress:
    """The optimizer steps of the call that has just ended."""

    first: int
    result: LoopResult
    seconds: float
    compiled: bool
    """Whether `seconds` includes tracing and compiling."""

    @property
    def step(self) -> int:
        return self.first + len(self.result.losses)


class Action:
    """Hooks before and after calls; by default they do nothing.

    All tasks have the same actions in the same order. They nest: the first runs last before a call and first after it.
    """

    def next(self, _step: int) -> int:
        """Return the first step after this one at which a call must end."""
        return sys.maxsize

    def before(self, step: int) -> None:
        """Prepare a call that begins after `step` steps."""

    def after(self, progress: CallProgress) -> Stop | None:
        """Act on a call. Returning a reason to stop, the same in all tasks, ends the training before later actions."""


class Periodic(Action):
    """An action that is due at certain steps, at each of which a call ends."""

    def __init__(self, following: Callable[[int], int]) -> None:
        """`following` returns the first such step after a step."""
        self._following = following

    def next(self, step: int) -> int:
        return self._following(step)

    def due(self, progress: CallProgress) -> bool:
        """Whether the call reached a step at which the action is due."""
        return self.next(progress.first) <= progress.step


def every(steps: int) -> Callable[[int], int]:
    """Return a function from a step to the next multiple of `steps`, or for 0 to `sys.maxsize`."""
    return lambda step: (step // steps + 1) * steps if steps else sys.maxsize


class Loop:
    """The calls of a training, and the actions around each.

    The length of a call depends only on the step and on signals that all tasks share, so all tasks make the same calls.
    """

    def __init__(self, first: int, actions: Sequence[Action], *, steps_per_loop: int, single: range = range(0)) -> None:
        """Begin after step `first`. Calls have up to `steps_per_loop` steps, or one if begun at a step in `single`."""
        self.step = self._first = first
        self._actions, self._steps_per_loop, self._single = actions, steps_per_loop, single
        self._max_steps = 1  # doubles after the first call that does not compile, so that a stop is never far away

    def begin_call(self) -> int:
        for action in reversed(self._actions):  # the first action encloses the call most closely
            action.before(self.step)
        most = 1 if self.step in self._single else self._max_steps
        end = min([self.step + most, *(action.next(self.step) for action in self._actions)])
        if self.step < self._single.start < end:
            end = self._single.start
        return end - self.step

    def end_call(self, result: LoopResult, seconds: float) -> Stop | None:
        """Run the actions after a call that took `seconds`; return the reason to stop, or None."""
        progress = CallProgress(self.step, result, seconds, compiled=self.step == self._first)
        self.step = progress.step
        if result.signals.brief:
            self._max_steps = max(1, self._max_steps // 2)
        elif not progress.compiled:
            self._max_steps = min(2 * self._max_steps, self._steps_per_loop)
        for action in self._actions:
            if (stop := action.after(progress)) is not None:
                return stop
        return None

    def run(self, steps: Steps, request: Request) -> Stop:
        stop = None
        while stop is None:
            count = self.begin_call()
            began = time.perf_counter()
            result = steps(self.step, count, request)
            stop = self.end_call(result, time.perf_counter() - began)
        return stop
