"""What a program of ours that runs code of the user's own answers: in a file, so that whatever that code does is told.

It may print, exit, start processes that stay, or never return. So what it prints is no part of the answer and goes to
stderr; without an answer the program has failed, whatever its exit code; and it has a bound in time, after which it and
all that it started in its process group are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cluster import settings
from cluster.errors import ClusterError, PrerequisiteError, TimedOut, UsageError
from cluster.messages import NOISE
from cluster.system import processes

ANSWER = "ANSWER_FILE"
"""The environment variable that says where the answer belongs."""

ERRORS = {error.exit_code: error for error in (ClusterError, UsageError, PrerequisiteError, TimedOut)}


def ask(command: Sequence[str], what: str, setting: str, *, cwd: Path, environment: Mapping[str, str]) -> Any:
    """Return what a program answers that calls `give`.

    Args:
        command: the program and its words.
        what: what of the user's own it runs, for errors.
        setting: which of `settings.SECONDS` bounds it.
        cwd: where it runs.
        environment: what it is started with.

    Raises:
        ClusterError: the one that it answers, or that it did not answer.
    """
    bound_s = settings.seconds(setting)
    with tempfile.TemporaryDirectory(prefix="tf-cluster-") as scratch:
        file = Path(scratch) / "answer.json"
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment, ANSWER: str(file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        shown = threading.Thread(target=_show, args=(process.stdout,), daemon=True)  # it closes what it reads
        shown.start()
        try:
            code = _wait(process, bound_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shown.join(1.0)  # what is still open then is held by a process that left the group
        if code is None:
            raise TimedOut(
                f"{what} did not return in {bound_s:g} s; mend what it waits for, or set {setting} to more seconds"
            )
        return _read(file, what, code)


def _show(printed: IO[bytes]) -> None:
    """Show on stderr what is printed: nobody must take it for what we print."""
    sys.stderr.flush()
    with printed:
        for line in printed:
            if not any(part in line for part in NOISE):
                with contextlib.suppress(OSError):
                    os.write(2, line)


def _wait(process: subprocess.Popen[bytes], bound_s: float) -> int | None:
    """Return the exit code; None where the program still runs after its time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return processes.wait(process, bound_s)
    return None


def _read(file: Path, what: str, code: int) -> Any:
    try:
        answer = json.loads(file.read_bytes())
    except (OSError, ValueError):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise UsageError(f"{what} ended the program with {how} instead of returning; mend it and try again") from None
    if "error" in answer:
        raise ERRORS.get(answer["exit_code"], ClusterError)(answer["error"])
    return answer["value"]


def give(body: Callable[[], Any]) -> int:
    """Answer what a function returns, or the error that it raises; return the exit code."""
    answer, code = {}, 0
    try:
        answer["value"] = body()
    except ClusterError as error:
        answer, code = {"error": str(error), "exit_code": error.exit_code}, error.exit_code
    file = Path(os.environ[ANSWER])
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(answer))
    scratch.replace(file)
    return code
