"""Traces of some steps of one task by TensorFlow's profiler during the training, as `invoke profile` requests.

Only this task's calls are wrapped, and their numbers of steps do not change, so that other tasks are not affected.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json, write_json
from train.loops.outer import Inner
from train.loops.steps import LoopResult


class Tracer:
    """Handles requests for a trace between two calls of the training."""

    def __init__(self, run: RunFolder, task: str) -> None:
        self._run = run
        self._task = task
        self._request: dict[str, Any] | None = None
        self._first = 0
        self._call: Any = None

    def around(self, inner: Inner) -> Inner:
        """Wrap the inner loop to handle requests before every call except the first, which compiles."""
        compiled = False

        def traced(first: int, count: int, stop: bool) -> LoopResult:
            nonlocal compiled
            self.before(first, compiles=not compiled)
            result = inner(first, count, stop)
            compiled = True
            self.after(first + count)
            return result

        return traced

    def before(self, step: int, *, compiles: bool) -> None:
        """Begin a trace if one is requested, before a call from step `step`."""
        if self._request is None and not compiles and self._run.trace_request.exists():
            self._begin(step)
        if self._request is not None:
            self._call = tf.profiler.experimental.Trace("train", step_num=step, _r=1)
            self._call.__enter__()

    def after(self, step: int) -> None:
        """End the trace after a call, at `step`, if it contains the requested steps."""
        if self._request is None:
            return
        self._call.__exit__(None, None, None)
        if step - self._first >= self._request["steps"]:
            request, self._request = self._request, None
            try:
                tf.profiler.experimental.stop()
            except tf.errors.OpError as error:
                self._answer(request, error=error.message)
            else:
                self._answer(request, first=self._first + 1, last=step)

    def _begin(self, step: int) -> None:
        request = read_json(self._run.trace_request, {})
        if request.get("task") != self._task:
            return
        try:
            tf.profiler.experimental.start(str(self._run.tensorboard(self._task)))
        except tf.errors.OpError as error:  # a user's callback is already tracing
            self._answer(request, error=error.message)
        else:
            self._request, self._first = request, step

    def _answer(self, request: dict[str, Any], **answer: Any) -> None:
        write_json(self._run.trace_answer, {"id": request["id"], "task": self._task, **answer})
        if read_json(self._run.trace_request, {}).get("id") == request["id"]:
            self._run.trace_request.unlink(missing_ok=True)
