"""How invoke runs a command here: with all that it starts in a process group of its own, so that it can be ended whole.

invoke's own runner passes a Ctrl-C on as a character that no program reads without a terminal, and kills the shell
alone when a command takes too long: an engine's client behind it would go on, and keep everybody waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from invoke import Context, Result
from invoke.exceptions import UnexpectedExit
from invoke.runners import Local


class Runner(Local):  # type: ignore[misc]  # invoke has no types
    """Ends a command that was interrupted: the first time it is asked to end, the second it is killed."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._interrupts = 0

    def start(self, command: str, shell: str, env: dict[str, Any]) -> None:
        """Start the command."""
        self.process = subprocess.Popen(
            [shell, "-c", command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )

    def send_interrupt(self, interrupt: KeyboardInterrupt) -> None:  # noqa: ARG002  # invoke's name
        """Pass a Ctrl-C on."""
        self._interrupts += 1
        self._signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

    def kill(self) -> None:
        """End the command and all that it started: it took too long."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _thread_join_timeout(self, target: Callable[..., Any]) -> int | None:
        """Return how long its output is waited for: what left the group may hold on to it."""
        ended = self.timed_out or self._interrupts > 0
        return 1 if ended else super()._thread_join_timeout(target)

    def _finish(self) -> Result:
        try:
            result = super()._finish()
        except UnexpectedExit:
            self._end_if_interrupted()
            raise
        self._end_if_interrupted()
        return result

    def _end_if_interrupted(self) -> None:
        if self._interrupts:
            self.kill()  # what of it does not listen
            raise KeyboardInterrupt
