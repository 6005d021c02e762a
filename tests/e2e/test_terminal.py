"""The tour in a terminal; a whole run in one is in `tests/promises/test_one_command_trains_a_cluster.py`."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from cluster.host.cli.tasks import tour
from cluster.system.files import ROOT

WIDTH = 80


def show(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run invoke in a terminal; return its exit code and what it showed."""
    process, terminal = pty.fork()
    if not process:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "invoke", *words], os.environ | environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    shown = b""
    try:
        while data := os.read(terminal, 2**16):
            shown += data
    except OSError:  # the terminal is closed
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), shown.decode()


def check_lines(shown: str) -> list[str]:
    """Return the lines that a terminal showed, none of which it wrapped; only paths and addresses may be longer."""
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    assert not [line for line in lines if len(line) > WIDTH and len(line[13:].split()) > 1]
    return lines


@pytest.mark.long
@pytest.mark.usefixtures("data")
def test_a_tour_must_end_with_the_same_weights_and_wrap_no_line(clusters):
    code, shown = show(["tour", "--yes"], clusters.settings | {"TERM": "xterm"})
    assert 0 == code, shown
    output = " ".join(" ".join(check_lines(shown)).replace(" \\ ", " ").split())
    for step in tour.STEPS:
        assert f"$ {step.command()}" in output
    assert "noticed after" in output
    assert "identical: " in output
