"""The logs of a run's tasks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.logs import Reader, rendered
from cluster.system.messages import plain

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Of the tasks' names in a terminal: a task has the same in every call."""
NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog"
    r"|(\S+ \S+: )?I(\d{4})? .*\.cc:\d+\]|To enable the following instructions: "
    r"|.*Unable to register cu(FFT|DNN|BLAS) factory"
)
"""Lines that TensorFlow prints when it starts, whatever it runs: information, and no warning of the program's own."""
_STYLED = re.compile(r"(\x1b\[[0-9;]*m|\t)")


def new_lines(reader: Reader, *, ended: bool, terminal: bool, styled: bool = False) -> Iterator[str]:
    """Yield what a program has printed since the last call, each line as a terminal shows it in the end.

    Args:
        reader: of its log.
        ended: whether it has ended, so that the last line may lack its end.
        terminal: whether the lines are for a terminal: without TensorFlow's start-up messages, and harmless.
        styled: whether to keep colours.
    """
    for printed in reader.lines(ended=ended):
        line = rendered(printed.decode(errors="replace"), styled=styled)
        if not terminal:
            yield line
        elif not NOISE.match(line):
            yield _harmless(line)


def _harmless(line: str) -> str:
    return "".join(part if at % 2 else plain(part) for at, part in enumerate(_STYLED.split(line)))


def print_logs(run: RunFolder, names: list[str], follow: bool) -> None:
    """Print what some tasks' programs printed, each line behind its task's name where there are several.

    Progress bars are shown in their last state. In a terminal colours are kept and TensorFlow's start-up messages left
    out.
    """
    terminal = sys.stdout.isatty()
    coloured = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max(len(name) for name in names)
    readers, silent = {name: Reader(run.log(name)) for name in names}, set(names)
    while True:
        ended = (
            not follow or run.load_summary() is not None
        )  # before reading: what was printed until then is still shown
        for at, (name, reader) in enumerate(readers.items()):
            head = f"{name:<{width}} |"
            head = f"\x1b[{COLOURS[at % len(COLOURS)]}m{head}\x1b[m" if coloured else head
            for line in new_lines(reader, ended=ended, terminal=terminal, styled=coloured):
                silent.discard(name)
                print(f"{head} {line}" if len(names) > 1 else line)
        sys.stdout.flush()
        if ended:
            break
        time.sleep(0.2)
    if silent == set(names):
        chief = "" if "chief" in names or run.script else "; the chief prints progress: invoke logs chief"
        print(f"{' and '.join(names)}: nothing was printed{chief}", file=sys.stderr)
