"""The task `tour`: the first ten minutes."""

from __future__ import annotations

import subprocess
import sys

from invoke import Exit

from cluster.host.checks import environment
from cluster.host.cli.command_line import answer, task
from cluster.host.control import tour as touring
from cluster.host.launch import folders
from cluster.system.errors import EXIT_FAILED, EXIT_INTERRUPTED
from cluster.system.files import write_text
from cluster.system.messages import counted
from cluster.system.paths import ROOT

PAGE = ROOT / "docs" / "guides" / "start.md"


@task(
    yes="run the commands without waiting for Enter before each (default: no)",
    write="renew docs/guides/start.md with what they print (default: no)",
)
def tour(c, yes=False, write=False):
    """Walk from a first cluster to a killed worker and the same weights again; explains and shows every command."""
    asks = sys.stdin.isatty() and not yes
    print("\n".join(touring.paragraph(touring.HEAD)))
    name = folders.free_folder(touring.RUN).name
    steps = touring.steps(name)
    try:
        ran = touring.take(steps, _agreed if asks else lambda: True, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        subprocess.run([sys.executable, "-m", "invoke", "down", name], cwd=ROOT, check=False)
        raise Exit("interrupted", code=EXIT_INTERRUPTED) from None
    if ran and ran[-1].code:
        message = f"error: {ran[-1].step.command} ended with exit code {ran[-1].code}; its last lines say why"
        raise Exit(message, code=ran[-1].code if ran[-1].code > 0 else EXIT_FAILED)
    if len(ran) < len(steps):
        left = len(steps) - len(ran)
        print(f"stopped, {counted(left, 'step')} before its end; invoke down {name} ends what runs")
        return
    print("\n" + "\n".join(touring.paragraph(touring.TAIL)))
    if write:
        write_text(PAGE, "\n".join(touring.document(ran, environment.shareable)) + "\n")


def _agreed() -> bool:
    return answer("press Enter to run it, q to stop: ") not in ("q", "quit", "n", "no")
