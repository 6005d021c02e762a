"""The logs of a run's tasks."""

from __future__ import annotations

import re
import sys
import time

from cluster.messages import plain
from cluster.run.folder import RunFolder
from cluster.run.logs import Reader

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def harmless(text: str) -> str:
    """Return a line that somebody's program printed, with its colours and tabs, but nothing that steers a terminal."""
    parts = _COLOUR.split(text)
    return "".join(part if at % 2 else "\t".join(map(plain, part.split("\t"))) for at, part in enumerate(parts)) + (
        "\x1b[m" if len(parts) > 1 else ""
    )


def print_logs(run: RunFolder, names: list[str], follow: bool) -> None:
    """Print what some tasks' programs printed, each line behind its task's name where there are several.

    In a terminal their colours are kept, and nothing else that would steer it; another program gets what they printed.
    """
    terminal = sys.stdout.isatty()
    width = max(len(name) for name in names)
    readers = {name: Reader(run.log(name)) for name in names}
    while True:
        ended = not follow or run.ended is not None  # before reading: what was printed until then is still shown
        for name, reader in readers.items():
            for printed in reader.lines(ended=ended):
                for line in printed.decode(errors="replace").splitlines() or [""]:
                    shown = harmless(line) if terminal else line
                    print(f"{name:<{width}} | {shown}" if len(names) > 1 else shown)
        sys.stdout.flush()
        if ended:
            return
        time.sleep(0.2)
