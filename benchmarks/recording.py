"""The recording in the README: two real runs, one of which loses a task, as an animated picture.

`invoke recording` trains twice with the README's command and kills a task of the second run. What the commands print
is kept with its times, and drawn as an SVG that needs no script: every line appears in turn, in light and dark, and
without animation all lines are there. Pauses longer than `MAX_PAUSE_S` are shortened; the seconds before the lines are
those that were measured.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from benchmarks.runs import LIMIT_S, ROOT, bench
from cluster.contract.run.folder import RunFolder
from cluster.system.errors import RunFailed
from cluster.system.waiting import wait_until

PICTURE = ROOT / "docs" / "guides" / "pictures" / "recording.svg"
VICTIM = "worker-0"
CALM, KILLED = "calm", "killed"
KILL_AT_STEP = 300
"""The training is in full swing by then, and has two thirds left."""
FOUND = r'"(resumed_s|weights_sha256)": [^,]+'
"""In summary.json: the seconds from the kill to the next new step, and the hash of the weights."""
LOOP_S, LAST_PAUSE_S, MAX_PAUSE_S = 20.0, 5.0, 1.5
COLUMNS = 108
CHARACTER_PX, LINE_PX, MARGIN_PX = 7.8, 21, 16


@dataclass
class Recording:
    """The lines of commands, in the order in which they appeared, each with its second."""

    began: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add a line that appears now."""
        self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def has(self, start: str, after: int) -> bool:
        """Return whether a line after the first `after` lines begins with `start`."""
        return any(line.startswith(start) for _, line in self.lines[after:])

    def follow(self, command: Sequence[str], cwd: Path) -> None:
        """Run a command to its end, and record its output.

        Raises:
            RunFailed: the command failed.
        """
        self.add("$ " + " ".join(f"'{word}'" if set(word) & set(' "|') else word for word in command))
        words = [sys.executable, "-m", *command] if command[0] == "invoke" else [*command]
        process = subprocess.Popen(
            words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            self.add(line)
        if process.wait(LIMIT_S):
            raise RunFailed(f"{command[0]} {command[1]} ended with {process.returncode}: {self.lines[-1][1]}")


def record(log: Callable[[str], object]) -> None:
    """Train twice, kill a task of the second run, and draw the output.

    Raises:
        RunFailed: the runs did not end with the same weights, or the second had not exactly one restart.
    """
    with ThreadPoolExecutor() as threads, bench(rounds=1, log=log) as runs:
        runs.invoke("data.prepare")
        recording, up = Recording(), "invoke up --workers 2 --runtime local --tensorboard-port 0 --name"
        recording.follow([*up.split(), CALM], ROOT)
        seen = len(recording.lines)
        training = threads.submit(recording.follow, [*up.split(), KILLED], ROOT)
        wait_until(lambda: training.done() or recording.has("step ", seen), LIMIT_S)
        recording.follow(["invoke", "chaos", "kill", VICTIM, "--at-step", str(KILL_AT_STEP)], ROOT)
        training.result()
        recording.follow(["grep", "-hoE", FOUND, *(f"{name}/summary.json" for name in (CALM, KILLED))], runs.folder)
        calm, killed = (RunFolder(runs.folder / name).load_summary() for name in (CALM, KILLED))
    if calm is None or killed is None or calm.restarts or [each.task for each in killed.restarts] != [VICTIM]:
        raise RunFailed(f"the first run must end without a restart, the second with one, of {VICTIM}; try again")
    if calm.weights_sha256 != killed.weights_sha256:
        raise RunFailed(f"the weights differ: {calm.weights_sha256} and, after the kill, {killed.weights_sha256}")
    PICTURE.write_text(draw(choose(recording.lines)))
    log(f"{PICTURE.relative_to(ROOT)}: next step {killed.restarts[0].resumed_s:.2f} s after the kill")


def choose(lines: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the lines to show: commands, results, and one line of progress before and one after the kill."""
    shown: list[tuple[float, str]] = []
    for second, line in lines:
        progress = line.startswith("step ")
        if progress and shown and shown[-1][1].startswith("step "):
            shown.pop()  # the later line says more
        if progress or re.match(r"\$ |kill |succeeded|\"(weights|resumed)|.*Strategy on ", line):
            shown.append((second, line))
    return shown


def draw(lines: Sequence[tuple[float, str]]) -> str:
    """Return an SVG in which the lines appear one after the other, in an endless loop."""
    pauses = [min(later - second, MAX_PAUSE_S) for (second, _), (later, _) in itertools.pairwise(lines)]
    scale = (LOOP_S - LAST_PAUSE_S) / max(sum(pauses), 1e-9)
    starts = [sum(pauses[:number]) * scale / LOOP_S * 100 for number in range(len(lines))]
    width, height = round(COLUMNS * CHARACTER_PX + 2 * MARGIN_PX), len(lines) * LINE_PX + 2 * MARGIN_PX
    rules = [
        f"@keyframes l{number}{{0%{{opacity:0}}{start:.1f}%{{opacity:1}}}}"
        f"#l{number}{{animation:l{number} {LOOP_S:g}s step-end infinite}}"
        for number, start in enumerate(starts)
        if start
    ]
    texts = [_text(number, second, line) for number, (second, line) in enumerate(lines)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" aria-labelledby="title">',
            '<title id="title">Two runs of a chief and two workers: the second loses a worker, continues, and ends with'
            " the same weights</title>",
            "<style>",
            "rect{fill:#f6f8fa;stroke:#d0d7de}text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
            "fill:#1f2328;white-space:pre}.s{fill:#656d76}.c{font-weight:bold;fill:#0550ae}.r{fill:#116329}",
            "@media(prefers-color-scheme:dark){rect{fill:#0d1117;stroke:#30363d}text{fill:#e6edf3}.s{fill:#8d96a0}"
            ".c{fill:#79c0ff}.r{fill:#7ee787}}",
            *rules,
            "@media(prefers-reduced-motion:reduce){text{animation:none!important}}",
            "</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


def _text(number: int, second: float, line: str) -> str:
    """Return a line with its second in front; commands and results have a colour."""
    kind = "c" if line.startswith("$ ") else "r" if re.match(r"kill |\"(weights|resumed)", line) else "o"
    seconds, shown = f"{second:6.1f} s  ", line if len(line) <= COLUMNS - 10 else f"{line[: COLUMNS - 14]} ..."
    y = MARGIN_PX + number * LINE_PX + 15
    return (
        f'<text id="l{number}" x="{MARGIN_PX}" y="{y}" xml:space="preserve">'
        f'<tspan class="s">{seconds}</tspan><tspan class="{kind}">{escape(shown)}</tspan></text>'
    )
