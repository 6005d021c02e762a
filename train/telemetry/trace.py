"""Traces of some steps of one task by TensorFlow's profiler during the training, as `invoke profile` requests.

Requests do not change the number of steps of a call, so that other tasks are not affected.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json, write_json
from train.loops.loop import Action, Progress


class Trace(Action):
    """Handles requests for a trace between two calls of the training."""

    def __init__(self, run: RunFolder, task: str) -> None:
        self._run = run
        self._task = task
        self._compiled = False
        self._request: dict[str, Any] | None = None
        self._first = 0
        self._call: Any = None

    def before(self, step: int) -> None:
        """Begin a trace if one is requested, unless the call compiles."""
        if self._request is None and self._compiled and self._run.trace_request.exists():
            self._begin(step)
        if self._request is not None:
            self._call = tf.profiler.experimental.Trace("train", step_num=step, _r=1)
            self._call.__enter__()

    def after(self, progress: Progress) -> None:
        """End the trace after a call if it contains the requested steps."""
        self._compiled = True
        if self._request is None:
            return
        self._call.__exit__(None, None, None)
        if progress.step - self._first >= self._request["steps"]:
            request, self._request = self._request, None
            try:
                tf.profiler.experimental.stop()
            except tf.errors.OpError as error:
                self._answer(request, error=error.message)
            else:
                self._answer(request, first=self._first + 1, last=progress.step)

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
