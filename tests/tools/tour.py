"""Renew docs/guides/start.md with the commands of the tour and their output.

python -m tests.tools.tour
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

from cluster.host.cli.tasks.tour import STEPS, TAIL
from cluster.system.files import ROOT

PAGE = ROOT / "docs" / "guides" / "start.md"
PROGRESS = re.compile(r"^(step .*\n)(?:step .*\n)+(step .*\n)", re.MULTILINE)
"""Progress lines; of each sequence the first and the last are kept."""
STATES = re.compile(r"^(?:chief .*\n)+(chief .*\n)", re.MULTILINE)
"""Lines with the tasks' states; of each sequence the last is kept."""
RESULTS = re.compile(r"^(?:kill|identical).*", re.MULTILINE)
LIMITS = "## What is not possible\n"
"""The heading from which on the page is kept as it is."""
SETUP = ("make setup", ". .venv/bin/activate", "invoke tour")


def main() -> None:
    command = [sys.executable, "-m", "invoke", "tour", "--yes"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    PAGE.write_text("\n".join(document(done.stdout)) + "\n")


def document(printed: str) -> list[str]:
    """Return the page, from the output of the tour."""
    results = [text for line in RESULTS.findall(printed) for text in ("...", line)]
    setup = [*(f"$ {command}" for command in SETUP), *printed.splitlines()[:3], *results]
    lines = ["# Start", "", "```console", *setup, "```", ""]
    lines += ["This is the output of `invoke tour` on 2 cores, with most progress lines left out.", ""]
    for number, step in enumerate(STEPS, 1):
        rest = printed.partition(f"\n$ {step.command()}")[2]
        shown = re.split(rf"\n\n{number + 1}/|\n\n{re.escape(TAIL[:20])}", rest)[0].removeprefix("\n")
        lines += [f"## {number}. {step.title}", "", *wrapped(step.why), ""]
        shown = STATES.sub(r"\1", PROGRESS.sub(r"\1\2", shown))
        printed_lines = [line.replace(str(ROOT), "<checkout>").rstrip() for line in shown.splitlines()]
        lines += ["```console", f"$ {step.command()}", *printed_lines, "```", ""]
    kept = PAGE.read_text().partition(LIMITS)[2].splitlines()
    return [*lines, *wrapped(TAIL), "", LIMITS.rstrip(), *kept]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False)


if __name__ == "__main__":
    main()
