"""Runs a program of the project that calls the user's code, and returns its result through a file.

The user's code may print, exit, start processes or never return. So its output goes to stderr and is not part of the
result; a program without a result has failed, whatever its exit code; and the program and its process group are killed
at its end or after a timeout.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from cluster.contract import kept_results, settings
from cluster.system import processes
from cluster.system.errors import ClusterError, PrerequisiteError, TimedOut, UsageError
from cluster.system.files import ROOT, scratch_folder
from cluster.system.messages import NOISE

RESULT_FILE = "RESULT_FILE"
"""The environment variable that names the file for the result."""
FOLDER = "CALLED_IN"
"""The environment variable that names the folder in which a data function runs: that of the user's command."""

ERRORS = {error.exit_code: error for error in (ClusterError, UsageError, PrerequisiteError, TimedOut)}


class Program(Protocol):
    """A running program. `wait` is like that of `subprocess.Popen`; `kill` also kills the program's process group."""

    stdout: IO[bytes]
    """The program's stdout and stderr."""

    def wait(self, timeout_s: float) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str]], Program]
"""Factory that starts a command in the checkout with the given environment."""


class NewProcess:
    """A program that runs as a new process."""

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=processes.die_with_parent,
        )
        assert self._process.stdout is not None
        self.stdout = self._process.stdout

    def wait(self, timeout_s: float) -> int:
        return processes.wait(self._process, timeout_s)

    def kill(self) -> None:
        processes.signal_group(self._process, signal.SIGKILL)
        self._process.wait()


def run(
    command: Sequence[str],
    what: str,
    setting: str,
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str],
    start: Start | None = None,
    kept: Path | None = None,
) -> Any:
    """Run a program that calls `reply`; return its result, or raise the ClusterError in its reply.

    `what` names the program in errors; `setting` is the key of its timeout in `settings.SECONDS`. Its output goes to
    stderr. `start` replaces the start of a new process in `cwd`. The result is kept in the file `kept`, with
    the last 1000 lines printed, for `kept_results.recall`.
    """
    timeout_s, began, printed = settings.seconds(setting), time.time(), deque[bytes](maxlen=1000)
    with scratch_folder() as scratch:  # also for temporary files of TensorFlow, which leaves them behind
        file = scratch / "result.json"
        variables = {**environment, RESULT_FILE: str(file), "TMPDIR": str(scratch)}
        process = start(command, variables) if start else NewProcess(command, cwd, variables)
        # The thread closes the pipe.
        printer = threading.Thread(target=_print, args=(process.stdout, printed), daemon=True)
        printer.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            fix = f"fix what it waits for, or set {setting} to more seconds"
            raise TimedOut(f"{what} did not return in {timeout_s:g} s; {fix}") from None
        finally:
            process.kill()
            printer.join(1.0)  # a process that left the group may still hold the pipe
        result = _read(file, what, code)
        if kept:
            kept_results.keep(kept, began, result, b"".join(printed).decode(errors="replace"))
        return result["value"]


def _print(output: IO[bytes], printed: deque[bytes]) -> None:
    sys.stderr.flush()
    with output:
        for line in output:
            if not any(part in line for part in NOISE):
                printed.append(line)
                with contextlib.suppress(OSError):
                    os.write(2, line)


def _read(file: Path, what: str, code: int) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise UsageError(f"{what} ended the program with {end} instead of returning; fix it and try again") from None
    if "error" in result:
        raise ERRORS.get(result["exit_code"], ClusterError)(result["error"])
    return result


def reply(body: Callable[[], Any], written: Sequence[Path] = ()) -> int:
    """Write a function's result, or the ClusterError that it raises, to the result file; return the exit code.

    The function may add to `written` the files that belong to its result: a kept result is used only while they exist.
    """
    result, code, file = dict[str, Any](), 0, Path(os.environ[RESULT_FILE])  # before the user's code changes variables
    kept_results.watch()
    try:
        result["value"] = body()
        result |= {"opened": kept_results.opened(), "written": [str(path.absolute()) for path in written]}
    except ClusterError as error:
        result, code = {"error": str(error), "exit_code": error.exit_code}, error.exit_code
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(result))
    scratch.replace(file)
    return code
