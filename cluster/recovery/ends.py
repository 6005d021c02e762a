"""How a task's program ended: whose doing that was, and in which words it is reported."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cluster.recovery.attempts import LOST_CONTACT, OUTSIDE, OWN
from cluster.run import records
from cluster.run.folder import RunFolder
from cluster.system.json_files import create_json

OWN_SIGNALS = frozenset(
    -number
    for number in (
        signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGTRAP, signal.SIGSYS,
        signal.SIGPIPE, signal.SIGXCPU, signal.SIGXFSZ,
    )
)  # fmt: skip
"""Codes of a program that ended by a signal of its own making; any other signal was sent from outside."""
MOST_CHARACTERS = 500

_TRACEBACK = "Traceback (most recent call last):"
_NAMED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")
"""How a line begins in which a program names its exception without a traceback."""
_GROUPED = re.compile(r"^ +[|+] ?")
"""What stands before the lines of a traceback in a group of exceptions."""
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:|[IWEF]\d{4} \d\d:")
"""How the lines begin that TensorFlow's native code logs."""
_FATAL = re.compile(r"Check failed: .*|terminate called .*|what\(\): .*|Assertion .* failed.*")
"""What native code says before it aborts."""
_CURRENT_THREAD = "Current thread 0x"
"""How the line begins below which Python's fault handler prints the stack of the thread that crashed."""
_CALL = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
"""A call in such a stack, the innermost one first."""
_STATED = "error: "
"""How the line begins in which our own programs report an error that they know."""


@dataclass(frozen=True)
class End:
    """The end of one task's program, or what its agent did about one that lived and did nothing."""

    task: str
    kind: str
    cause: str
    """What ended it, in words."""
    error: str | None
    """What the program itself reported."""
    at: float
    """Seconds since the epoch."""
    furthest: int = -1
    lived_s: float = 0.0
    may_follow: bool = False
    """Whether it may be due to another task's end."""

    @property
    def reported(self) -> str:
        """The program's own error, otherwise what ended it."""
        return self.error or self.cause


def kind_of(code: int, *, out_of_memory: bool) -> str:
    """Return whose doing it was that a program ended with this code, negative for a signal."""
    return OWN if code >= 0 or code in OWN_SIGNALS or out_of_memory else OUTSIDE


def record(run: RunFolder, generation: int, end: End) -> None:
    """Let the other agents know of an end of this generation."""
    with contextlib.suppress(OSError):  # a full disk
        create_json(run.control / "ends" / f"{generation}-{end.task}.json", asdict(end))


def ended_tasks(run: RunFolder, generation: int) -> frozenset[str]:
    """Return the tasks whose agents have reported an end of this generation."""
    paths = (run.control / "ends").glob(f"{generation}-*.json")
    return frozenset(path.stem.partition("-")[2] for path in paths)


def culprit(run: RunFolder, generation: int, own: End) -> End:
    """Return the end that began a generation's failure: the first, and none that may be due to another."""
    found = [own]
    for path in sorted((run.control / "ends").glob(f"{generation}-*.json")):
        if recorded := records.read(path, records.end, None):
            found.append(End(**recorded))
    return min(found, key=lambda end: (end.kind == LOST_CONTACT, end.may_follow, end.at))


def error_in(lines: Sequence[str], code: int) -> str | None:
    """Return the error that a program reported in the last lines that it printed; None where there is none in them.

    Args:
        lines: as printed, with their indentation.
        code: what it ended with, negative for a signal.
    """
    if code < 0:
        return _crash(lines)
    lines = [_GROUPED.sub("", line) for line in lines if not _LOGGED.match(line)]
    begin = max((at for at, line in enumerate(lines) if line.strip() == _TRACEBACK), default=None)
    stated = max((at for at, line in enumerate(lines) if line.startswith(_STATED)), default=None)
    if stated is not None and (begin is None or stated > begin):
        return _short([lines[stated].removeprefix(_STATED)])
    if begin is not None:
        frames = lines[begin + 1 :]
        at = next((at for at, line in enumerate(frames) if line and not line[0].isspace()), len(frames))
        return _short([line.strip() for line in frames[at:] if line.strip()]) or None
    named = [line for line in lines if _NAMED.match(line)]
    return _short(named[-1:]) or None


def _crash(lines: Sequence[str]) -> str | None:
    """Return what native code said last, and in which call of Python's it was."""
    said = [match.group() for line in lines if (match := _FATAL.search(line))][-1:]
    begin = max((at for at, line in enumerate(lines) if line.startswith(_CURRENT_THREAD)), default=len(lines))
    if call := next(filter(None, map(_CALL.match, lines[begin + 1 :])), None):
        said.append(f"in {call['function']} ({call['file']}:{call['line']})")
    return _short(said) or None


def _short(message: Sequence[str]) -> str:
    """Return a message in one line: all of it, or what it begins and ends with."""
    whole = " ".join(message)
    if len(whole) > MOST_CHARACTERS and len(message) > 1:
        whole = f"{message[0][: MOST_CHARACTERS // 2]} ... {message[-1][: MOST_CHARACTERS // 2]}"
    return whole[:MOST_CHARACTERS]
