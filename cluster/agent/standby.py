"""A warm spare: the next life's program, started beside the one that trains, its imports done, waiting at its gate.

Importing TensorFlow is most of what a restart takes. The spare costs its memory and, once, the import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cluster import settings
from cluster.agent.program import Program
from cluster.system import cgroup
from cluster.system.processes import available_bytes

STAGGER_S = 2.0
"""Tasks start their spares one after the other, the first when its program has trained for `WARM_SPARE_DELAY_S`, so
that the start of the run is not slowed down."""
MEMORY_BYTES = 700 * 2**20
"""What a program holds that has imported TensorFlow."""
OFFERED = 1000
"""The kernel's highest score: a spare goes before anything that trains."""
RESERVE_BYTES = 2 * 2**30
"""Free memory that spares leave to the programs that train."""
OWN_RESERVE_BYTES = 2**29
"""What a spare leaves to its own task of the memory that this may use."""


class Spare:
    """Holds one task's spare program; there is none until the task has trained for a while."""

    def __init__(self, start: Callable[[dict[str, str]], Program], index: int, num_tasks: int) -> None:
        """Prepare for a spare.

        Args:
            start: starts a program in the environment given.
            index: this task's place among the run's.
            num_tasks: how many tasks may want a spare on this machine.
        """
        self._start = start
        delay_s = settings.seconds("WARM_SPARE_DELAY_S")
        self._delay_s = delay_s if settings.is_set("WARM_SPARE_DELAY_S") else delay_s + STAGGER_S * index
        self._wanted = settings.is_on("WARM_SPARE")
        self._num_tasks = num_tasks
        self._program: Program | None = None
        self._training_since: float | None = None

    @property
    def settled(self) -> bool:
        """Whether there is nothing to decide: it is there, or not wanted."""
        return self._program is not None or not self._wanted

    @property
    def killed(self) -> bool:
        """Whether the spare that there was has been killed."""
        return self._program is not None and self._program.ended and self._program.wait() == -signal.SIGKILL

    def keep(self, *, training: bool) -> None:
        """Have a spare if it is time for one: called often while the task's program lives.

        Args:
            training: whether it trains right now; what it does in between, such as saving, counts as well.
        """
        if self._training_since is None:
            self._training_since = time.monotonic() if training else None
            return
        if self.settled or time.monotonic() - self._training_since < self._delay_s:
            return
        short = available_bytes() < RESERVE_BYTES + MEMORY_BYTES * self._num_tasks
        if short or cgroup.room_bytes() < OWN_RESERVE_BYTES + MEMORY_BYTES:
            self._wanted = False
            return
        self._program = self._start(dict(os.environ) | {"SPARE": "1"})
        self._offer(OFFERED)

    def take(self) -> Program | None:
        """Return the spare for the next life, if there is one that lives."""
        self._training_since = None
        self._offer(0)
        program, self._program = self._program, None
        if program and program.ended:
            program.end(0.0)
            return None
        return program

    def _offer(self, score: int) -> None:
        """Tell the kernel how readily to end the spare where memory runs out."""
        if self._program:
            with contextlib.suppress(OSError):  # it ended meanwhile
                Path(f"/proc/{self._program.pid}/oom_score_adj").write_text(str(score))

    def end(self) -> None:
        """End the spare."""
        if program := self.take():
            program.end(0.0)
