"""The end of a task's program: whether it failed by itself or was ended from outside, and its error."""

import contextlib
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from cluster.contract.recovery.attempt_limits import EXTERNAL, LOST_CONTACT, PROGRAM_FAILURE
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.schema import Record, Seconds, Step
from cluster.system.json_files import create_json
from cluster.system.messages import shortened

OWN_SIGNALS = frozenset(
    -number
    for number in (
        signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGTRAP, signal.SIGSYS,
        signal.SIGPIPE, signal.SIGXCPU, signal.SIGXFSZ,
    )
)  # fmt: skip
"""Codes of fatal signals that a program causes itself; any other signal was sent from outside."""
MAX_CHARACTERS = 1000
"""Enough for the class of an error, TensorFlow's advice at the end of the message, and our hint after it."""

_TRACEBACK = re.compile(r"(?<!Exception Group )Traceback \(most recent call last\):\s*$")
"""An unfinished progress bar may precede it."""
_NAMED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")
"""The beginning of a line that names an exception without a traceback."""
_GROUPED = re.compile(r"^ +[|+] ?")
"""The prefix of a traceback's lines in a group of exceptions."""
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:|[IWEF]\d{4} \d\d:")
"""The beginning of a line logged by TensorFlow's native code."""
_FATAL = re.compile(r"Check failed: .*|terminate called .*|what\(\): .*|Assertion .* failed.*")
"""The message of native code before it aborts."""
_CURRENT_THREAD = "Current thread 0x"
"""The beginning of the line after which Python's fault handler prints the stack of the crashed thread."""
_CALL = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
"""A line of that stack, the innermost call first."""
_STATED = "error: "
"""The beginning of the line in which our own programs report a known error."""


class End(Record, kw_only=False):
    """The end of one task's program, or an agent's decision to end a stalled one."""

    task: str
    kind: str
    cause: str
    error: str | None
    """The error that the program itself reported; None without one."""
    at: Seconds
    """The time of the end, in seconds since the epoch."""
    last_step: Step = -1
    runtime_s: Seconds = 0.0
    may_follow: bool = False
    """Whether it may be a consequence of another task's end."""
    host: str = ""

    @property
    def reported(self) -> str:
        """The program's own error if it reported one, otherwise the cause."""
        return self.error or self.cause


def classify_code(code: int, *, out_of_memory: bool) -> str:
    """Return `PROGRAM_FAILURE` or `EXTERNAL` for an exit code, negative for a signal."""
    return PROGRAM_FAILURE if code >= 0 or code in OWN_SIGNALS or out_of_memory else EXTERNAL


def record_end(run: RunFolder, generation: int, end: End) -> None:
    """Report the end of a program in this generation to the other agents."""
    with contextlib.suppress(OSError):  # a full disk
        create_json(_path(run, generation, end.task), end.to_json())


def recorded_end(run: RunFolder, generation: int, task: str) -> End | None:
    """Return the end that a task's agent reported in this generation, even if the folder does not list it yet."""
    return records.read_record(_path(run, generation, task), End.from_json, None)


def _path(run: RunFolder, generation: int, task: str) -> Path:
    return run.control / "ends" / f"{generation}-{task}.json"


def ended_tasks(run: RunFolder, generation: int) -> frozenset[str]:
    """Return the tasks whose agents have reported an end in this generation."""
    return frozenset(path.stem.partition("-")[2] for path in (run.control / "ends").glob(f"{generation}-*.json"))


def root_cause(run: RunFolder, generation: int, own: End) -> End:
    """Return the end that made a generation fail: the first, preferring ends that are not consequences of another.

    `own` comes first if it is not recorded: it is then that of a silent, frozen or hanging task, noticed late.
    """
    known = recorded_ends(run, generation)
    unknown = [] if own.task in (end.task for end in known) else [own]
    return min([*unknown, *known], key=lambda end: (end.kind == LOST_CONTACT, end.may_follow))


def recorded_ends(run: RunFolder, generation: int) -> list[End]:
    """Return the ends that agents have reported in this generation, in the order of the reports.

    The order is that of the file system's timestamps, since the agents' clocks may differ.
    """
    paths = sorted((run.control / "ends").glob(f"{generation}-*.json"), key=lambda p: (p.lstat().st_mtime_ns, p))
    return [end for path in paths if (end := records.read_record(path, End.from_json, None))]


def find_error(lines: Sequence[str], code: int) -> str | None:
    """Return the error that a program reported in the last lines of its output; None if they contain none.

    The lines must keep their indentation; the exit code is negative for a signal.
    """
    if code < 0:
        return _crash(lines)
    lines = [_GROUPED.sub("", line) for line in lines if not _LOGGED.match(line)]
    begin = max((at for at, line in enumerate(lines) if _TRACEBACK.search(line)), default=None)
    stated = max((at for at, line in enumerate(lines) if line.startswith(_STATED)), default=None)
    if stated is not None and (begin is None or stated > begin):
        return _short([lines[stated].removeprefix(_STATED)])
    if begin is not None:
        frames = lines[begin + 1 :]
        at = next((at for at, line in enumerate(frames) if line and not line[0].isspace()), len(frames))
        return _short([line.strip() for line in frames[at:] if line.strip()]) or None
    return _short([line for line in lines if _NAMED.match(line)][-1:]) or None


def _crash(lines: Sequence[str]) -> str | None:
    """Return the last fatal message of native code, and the Python call in which the program crashed."""
    message = [match.group() for line in lines if (match := _FATAL.search(line))][-1:]
    begin = max((at for at, line in enumerate(lines) if line.startswith(_CURRENT_THREAD)), default=len(lines))
    if call := next(filter(None, map(_CALL.match, lines[begin + 1 :])), None):
        message.append(f"in {call['function']} ({call['file']}:{call['line']})")
    return _short(message) or None


def _short(message: Sequence[str]) -> str:
    return shortened(" ".join(message), MAX_CHARACTERS)
