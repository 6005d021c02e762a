"""Renew docs/guides/start.md with the commands of the tour and their output.

python -m tests.tools.tour
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

from cluster.host.cli.tasks.tour import HEAD, STEPS, TAIL
from cluster.system.paths import ROOT

PAGE = ROOT / "docs" / "guides" / "start.md"
PROGRESS = re.compile(r"^(step .*\n)(step .*\n)(?:step .*\n)+(step .*\n)", re.MULTILINE)
"""Progress lines; of each sequence the first two and the last are kept."""
SETUP = ("make setup", ". .venv/bin/activate", "invoke tour")


def main() -> None:
    command = [sys.executable, "-m", "invoke", "tour", "--yes"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    PAGE.write_text("\n".join(document(done.stdout)) + "\n")


def document(printed: str) -> list[str]:
    """Return the page, from the output of the tour."""
    lines = ["# Start", "", *wrapped(HEAD), ""]
    lines += ["```console", *(f"$ {command}" for command in SETUP), "```", ""]
    lines += ["This is the output of `invoke tour` on 2 busy cores, with most progress lines left out.", ""]
    for number, step in enumerate(STEPS, 1):
        rest = printed.partition(f"\n$ {step.command()}")[2]
        shown = re.split(rf"\n\n{number + 1}/|\n\n{re.escape(TAIL[:20])}", rest)[0].removeprefix("\n")
        lines += [f"## {number}. {step.title}", "", *wrapped(step.why), ""]
        shown = PROGRESS.sub(r"\1\2\3", shown)
        printed_lines = [line.replace(str(ROOT), "<checkout>").rstrip() for line in shown.splitlines()]
        lines += ["```console", f"$ {step.command()}", *printed_lines, "```", ""]
    return [*lines, *wrapped(TAIL)]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False)


if __name__ == "__main__":
    main()
