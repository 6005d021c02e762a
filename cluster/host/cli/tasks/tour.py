"""The task `tour`: ten minutes from a clone to a killed worker and the same weights again.

Each command is explained and shown before it runs.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass

from invoke import Exit

from cluster.host.cli.command_line import ask_user, task
from cluster.host.launch import folders
from cluster.system.errors import EXIT_FAILED, EXIT_INTERRUPTED
from cluster.system.messages import COMMAND, counted
from cluster.system.paths import ROOT
from cluster.system.terminal import terminal_width

RUN = "first-run"
WIDTH = 80
HEAD = (
    "Ten minutes from a clone to a killed worker and the same weights again. No Docker Engine, no GPU and no account "
    "is needed: everything runs as processes of this machine, in `runs`."
)


@dataclass(frozen=True)
class TourStep:
    """One command, with what happens and why."""

    title: str
    why: str
    words: tuple[str, ...]
    at_once: bool = False
    """Whether to run it without asking: the run that it is about does not wait for a reader."""

    def command(self, run: str = RUN) -> str:
        return shlex.join([COMMAND, *(run if word == RUN else word for word in self.words)])


STEPS = (
    TourStep(
        "What a cluster is",
        "Distributed training means several processes, each with a role and an address. TensorFlow reads them from the "
        "variable TF_CONFIG. Nothing is started yet: this only draws the cluster that the next step makes.",
        ("explain", "--workers", "1"),
    ),
    TourStep(
        "Start it",
        "A chief and a worker train a small network on Fashion-MNIST. Under MultiWorkerMirroredStrategy each computes"
        " the gradients of half of every batch, and all-reduce sums them, so that both hold the same weights. "
        "--detach returns once both train. The data is prepared first if it is not there yet.",
        (
            *("up", "--workers", "1", "--runtime", "local", "--name", RUN, "--tensorboard-port", "0"),
            *("--checkpoint-every", "100", "--detach", "--", "--epochs", "5"),
        ),
    ),
    TourStep(
        "Look at it",
        "Each task writes a heartbeat every second: its state, step, speed, and how much of a step it is busy. "
        f"`{COMMAND} status --watch` keeps this on the screen, `{COMMAND} logs` shows what the programs print.",
        ("status", RUN),
        at_once=True,
    ),
    TourStep(
        "Kill a worker",
        "A real SIGKILL, not before step 150. In a synchronous step every task waits for all others, so that one lost "
        "task stops all: the agents end both programs and start them again from the newest good checkpoint. The "
        "command returns once there is a new step, and reports what that cost.",
        ("chaos", "kill", "worker-0", "--at-step", "150", "--run", RUN),
        at_once=True,
    ),
    TourStep(
        "Wait for the end",
        "The run continues as if nothing had happened: the examples of a step are a function of the seed and the step "
        "alone, so that none is skipped or seen twice.",
        ("wait", RUN),
    ),
    TourStep(
        "Run it again",
        "The manifest in the run's folder has everything that determines the result. This trains once more, "
        "undisturbed, and compares every logged loss and the final weights with those of the run that lost a worker.",
        ("rerun", RUN),
    ),
    TourStep(
        "Keep it",
        "One HTML page with the curves, the restart and its cost, and where the time went. It needs no network. The "
        "card `README.md` next to it says how to run this again.",
        ("report", RUN),
    ),
)
TAIL = (
    f"Next: `{COMMAND} up` with containers and TensorBoard, docs/guides/your-model.md to train your own model, "
    "docs/guides/faults.md for more faults."
)


@task(yes="run the commands without waiting for Enter before each (default: no)")
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
    lines = textwrap.wrap(
        f"$ {command}",
        terminal_width() - 2,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n" + " \\\n".join(lines), flush=True)


def _print_paragraph(text: str) -> None:
    print("\n".join(textwrap.wrap(text, min(WIDTH, terminal_width()), break_on_hyphens=False)))
