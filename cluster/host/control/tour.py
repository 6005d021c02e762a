"""`invoke tour`: ten minutes from a clone to a killed worker and the same weights again.

Each command is explained and shown before it runs. docs/guides/start.md is made from what they print.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.system.paths import ROOT

RUN = "first-run"
WIDTH = 80
HEAD = (
    "Ten minutes from a clone to a killed worker and the same weights again. No Docker Engine, no GPU and no account "
    "is needed: everything runs as processes of this machine, in `runs`."
)


@dataclass(frozen=True)
class Step:
    """One command, with what happens and why."""

    title: str
    why: str
    words: tuple[str, ...]
    at_once: bool = False
    """Whether to run it without asking: the run that it is about does not wait for a reader."""

    @property
    def command(self) -> str:
        """As one types it."""
        return shlex.join(["invoke", *self.words])


STEPS = (
    Step(
        "What a cluster is",
        "Distributed training means several processes, each with a role and an address. TensorFlow reads them from the "
        "variable TF_CONFIG. Nothing is started yet: this only draws the cluster that the next step makes.",
        ("explain", "--workers", "1"),
    ),
    Step(
        "Start it",
        "A chief and a worker train a small network on Fashion-MNIST. Under MultiWorkerMirroredStrategy each computes"
        " the gradients of half of every batch, and all-reduce sums them, so that both hold the same weights. "
        "--detach returns once both train. The data is prepared first if it is not there yet.",
        (
            *("up", "--workers", "1", "--runtime", "local", "--name", RUN, "--tensorboard-port", "0"),
            *("--checkpoint-every", "100", "--detach", "--", "--epochs", "5"),
        ),
    ),
    Step(
        "Look at it",
        "Each task writes a heartbeat every second: its state, step, speed, and how much of a step it is busy. `invoke "
        "status --watch` keeps this on the screen, `invoke logs` shows what the programs print.",
        ("status", RUN),
        at_once=True,
    ),
    Step(
        "Kill a worker",
        "A real SIGKILL, not before step 150. In a synchronous step everybody waits for everybody, so that one lost "
        "task stops all: the agents end both programs and start them again from the newest good checkpoint. The "
        "command returns once there is a new step, and reports what that cost.",
        ("chaos", "kill", "worker-0", "--at-step", "150", "--run", RUN),
        at_once=True,
    ),
    Step(
        "Wait for the end",
        "The run goes on as if nothing had happened: which examples a step uses is a function of the seed and the step "
        "alone, so that no example is skipped or seen twice.",
        ("wait", RUN),
    ),
    Step(
        "Run it again",
        "The manifest in the run's folder has everything that determines the result. This trains once more, "
        "undisturbed, and compares every logged loss and the final weights with those of the run that lost a worker.",
        ("rerun", RUN),
    ),
    Step(
        "Keep it",
        "One HTML page with the curves, the timeline with the fault, and where the time went. It needs no network. The "
        "card `README.md` beside it says how to run this again.",
        ("report", RUN, "--quick"),
    ),
)
TAIL = (
    "Next: `invoke up` with containers and TensorBoard, docs/guides/your-model.md to train your own model, "
    "docs/guides/faults.md for more faults."
)


@dataclass(frozen=True)
class Ran:
    """A step that ran."""

    step: Step
    code: int
    output: list[str]


def steps(run: str) -> list[Step]:
    """Return the steps of a tour whose run has this name; it must be free, since the tour deletes nothing."""
    return [replace(step, words=tuple(run if word == RUN else word for word in step.words)) for step in STEPS]


def take(steps: Sequence[Step], agreed: Callable[[], bool], say: Callable[[str], None]) -> list[Ran]:
    """Run the steps in turn, until one fails or the user stops; return those that ran.

    Args:
        steps: what to run.
        agreed: asks before each command that may wait; False stops the tour.
        say: prints a line.
    """
    ran: list[Ran] = []
    for number, step in enumerate(steps, 1):
        say("")
        say(f"{number}/{len(steps)}  {step.title}")
        for line in paragraph(step.why):
            say(line)
        say("")
        say(f"$ {step.command}")
        if not step.at_once and not agreed():
            break
        ran.append(run(step, say))
        if ran[-1].code:
            break
    return ran


def run(step: Step, say: Callable[[str], None]) -> Ran:
    """Run a step's command, and show what it prints."""
    output: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "invoke", *step.words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout
        for line in process.stdout:
            output.append(line.rstrip("\n"))
            say(output[-1])
    return Ran(step, process.returncode, output)


def paragraph(text: str) -> list[str]:
    """Return a text as lines that fit into the terminal, and into 80 columns."""
    return textwrap.wrap(text, min(WIDTH, shutil.get_terminal_size().columns), break_on_hyphens=False)


def document(ran: Sequence[Ran], shareable: Callable[[str], str]) -> list[str]:
    """Return docs/guides/start.md: the steps with what they printed."""
    lines = [
        "# A tour",
        "",
        *textwrap.wrap(HEAD, 120),
        "",
        "```console",
        *(f"$ {command}" for command in SETUP),
        "```",
        "",
    ]
    lines += ["What follows is the output of `invoke tour` on 2 cores, with lines left as they are.", ""]
    for number, each in enumerate(ran, 1):
        shown = [shareable(line).rstrip() for line in each.output]
        lines += [f"## {number}. {each.step.title}", "", *textwrap.wrap(each.step.why, 120, break_on_hyphens=False), ""]
        lines += ["```console", f"$ {each.step.command}", *shown, "```", ""]
    return [*lines, *textwrap.wrap(TAIL, 120, break_on_hyphens=False)]


SETUP = ("make setup", ". .venv/bin/activate", "invoke tour")
