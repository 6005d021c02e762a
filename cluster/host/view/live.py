"""The live view of a run, and the output of its tasks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.logs import LogReader, render_line
from cluster.host.view.status import chief_loss, live_lines, progress
from cluster.system.messages import COMMAND, plain
from cluster.system.terminal import outliving_reader, print_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live as Screen

MAX_LOSSES = 2000
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""The ANSI colours of task names in `logs`, by position."""
NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog"
    r"|(\S+ \S+: )?I(\d{4})? .*\.cc:\d+\]|To enable the following instructions: "
    r"|.*Unable to register cu(FFT|DNN|BLAS) factory"
)
"""Informational lines that TensorFlow always prints at its start."""
_STYLED = re.compile(r"(\x1b\[[0-9;]*m|\t)")


class Live:
    """Context manager that shows a run while it trains: a live table in a terminal, otherwise a line for each change.

    With `run` and without a terminal, it also prints the chief's output. The table disappears at the end of the `with`
    block, or by `clear`, so that other lines can follow.
    """

    LINE_EVERY_S = 5.0

    def __init__(self, run: RunFolder | None = None) -> None:
        self._output = LogReader(run.log("chief")) if run else None
        if run and self._output and run.generation:  # a resumed run: skip earlier output
            list(self._output.lines(ended=False))
        self._console: Console | None = None
        self._screen: Screen | None = None
        self._states: dict[str, str] = {}
        self._line = self._queued = ""
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._logged: tuple[int, float] | None = None
        self._line_at = 0.0
        if sys.stdout.isatty():
            from rich.console import Console

            console = Console()
            self._console = None if console.is_dumb_terminal else console

    def __enter__(self) -> Live:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.clear()
        if not self._console:
            with outliving_reader() if kind else contextlib.nullcontext():  # the exception counts, not the output
                self._print_output(ended=True)

    def show(self, value: dict[str, Any]) -> None:
        if console := self._console:
            loss = chief_loss(value)
            if loss is not None and (value["step"], loss) != self._logged:
                self._logged = (value["step"], loss)
                self._losses.append(loss)
            from rich.live import Live as Screen
            from rich.text import Text

            if self._screen is None:
                # Without redirection, since subprocesses print directly to the terminal.
                self._screen = Screen(
                    console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
                )
                self._screen.start()
            lines = live_lines(value, self._losses, console.width)
            self._screen.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)
            return
        self._print_output(ended=False)
        states = {beat["task"]: beat["state"] for beat in value["tasks"]}
        settled = {name: state for name, state in states.items() if state not in ("saving", "evaluating")}
        if any(self._states.get(name) != state for name, state in settled.items()):
            print_lines(plain("  ".join(f"{name} {state}" for name, state in states.items())))
            self._states |= settled
        if (queued := plain(value.get("queued", ""))) != self._queued:
            self._queued = queued
            if queued:
                print_lines(queued)
        if value["step"] and time.monotonic() - self._line_at > self.LINE_EVERY_S:
            if (line := plain(progress(value))) != self._line:
                print_lines(line)
            self._line, self._line_at = line, time.monotonic()

    def _print_output(self, *, ended: bool) -> None:
        if self._output:
            for line in new_lines(self._output, ended=ended, terminal=True):
                print(f"chief | {line}")
            sys.stdout.flush()

    def clear(self) -> None:
        """Remove the table from the terminal."""
        if self._screen:
            self._screen.stop()
            self._screen = None


def new_lines(reader: LogReader, *, ended: bool, terminal: bool, styled: bool = False) -> Iterator[str]:
    """Yield the lines that a program has printed since the last call, each in its final state on a terminal.

    Once the program has `ended`, this includes an unfinished last line. For a terminal, TensorFlow's start-up messages
    are dropped and control characters escaped; `styled` keeps colours.
    """
    for printed in reader.lines(ended=ended):
        line = render_line(printed.decode(errors="replace"), styled=styled)
        if not terminal:
            yield line
        elif not NOISE.match(line):
            yield "".join(part if at % 2 else plain(part) for at, part in enumerate(_STYLED.split(line)))


def print_logs(
    run: RunFolder, names: list[str], *, follow: bool, last: int | None = None, since: float | None = None
) -> None:
    """Print the output of some tasks' programs, with the task's name before each line if there are several tasks.

    The output begins at the time `since`, and with the `last` lines of each task; None for no such limit. Progress bars
    are printed in their last state. In a terminal, colours are kept and TensorFlow's start-up messages dropped.
    """
    terminal = sys.stdout.isatty()
    coloured = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(len(name) for name in names)
    readers, silent = {name: LogReader(run.log(name)) for name in names}, set(names)
    if since is not None:
        for reader in readers.values():
            reader.skip_until(since)
    while True:
        # Before reading, so that all output up to the end is printed.
        ended = not follow or run.load_summary() is not None
        for at, (name, reader) in enumerate(readers.items()):
            head = f"{name:<{width}} |"
            head = f"\x1b[{COLOURS[at % len(COLOURS)]}m{head}\x1b[m" if coloured else head
            lines = new_lines(reader, ended=ended, terminal=terminal, styled=coloured)
            for line in lines if last is None else deque(lines, last):
                silent.discard(name)
                print(f"{head} {line}" if len(names) > 1 else line)
        sys.stdout.flush()
        last = None
        if ended:
            break
        time.sleep(0.2)
    if silent == set(names):
        chief = "" if "chief" in names or run.script else f"; the chief prints progress: {COMMAND} logs chief"
        print(f"{' and '.join(names)}: nothing was printed{chief}", file=sys.stderr)
