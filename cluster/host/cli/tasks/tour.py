"""The task `tour`: ten minutes from a clone to a killed worker and the same weights again.

Each command is explained, in the words of `tour.toml`, and shown before it runs.
"""

import shlex
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from invoke import Exit

from cluster.host.cli.command_line import ask_user, task
from cluster.host.launch import folders
from cluster.system.errors import EXIT_FAILED, EXIT_INTERRUPTED
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND, counted
from cluster.system.terminal import terminal_width

RUN = "first-run"
WIDTH = 80


@dataclass(frozen=True)
class TourStep:
    """One command, with what happens and why."""

    title: str
    why: str
    line: str
    at_once: bool = False
    """Whether to run it without asking: the run that it is about does not wait for a reader."""

    def command(self, run: str = RUN) -> str:
        return f"{COMMAND} {self.line.format(run=run)}"


_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HEAD, TAIL = _WORDS["head"], _WORDS["tail"].format(command=COMMAND)
STEPS = tuple(TourStep(**step | {"why": step["why"].format(command=COMMAND)}) for step in _WORDS["steps"])


@task()
def tour(c, yes=False):
    """Walk from a first cluster to a killed worker and the same weights again; explains and shows every command."""
    asks = sys.stdin.isatty() and not yes
    run = folders.free_folder(RUN).name  # the tour deletes nothing
    _print_paragraph(HEAD)
    try:
        for number, step in enumerate(STEPS, 1):
            print(f"\n{number}/{len(STEPS)}  {step.title}")
            _print_paragraph(step.why)
            _print_command(step.command(run))
            if asks and not step.at_once and ask_user("press Enter to run it, q to stop: ") in ("q", "quit", "n", "no"):
                left = len(STEPS) - number + 1
                print(f"stopped, {counted(left, 'step')} before its end; {COMMAND} down {run} ends what runs")
                return
            if code := run_command(step.command(run)):
                message = f"error: {step.command(run)} ended with exit code {code}; its last lines say why"
                raise Exit(message, code=code if code > 0 else EXIT_FAILED)
    except KeyboardInterrupt:
        run_command(f"{COMMAND} down {run}")
        raise Exit("interrupted", code=EXIT_INTERRUPTED) from None
    print()
    _print_paragraph(TAIL)


def run_command(command: str) -> int:
    """Run one of our commands; return its exit code."""
    words = [sys.executable, "-m", "invoke", *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False).returncode


def _print_command(command: str) -> None:
    wrapper = textwrap.TextWrapper(terminal_width() - 2, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = "    "
    print("\n" + " \\\n".join(wrapper.wrap(f"$ {command}")), flush=True)


def _print_paragraph(text: str) -> None:
    print("\n".join(textwrap.wrap(text, min(WIDTH, terminal_width()), break_on_hyphens=False)))
