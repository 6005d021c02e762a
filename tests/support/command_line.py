"""The command line, called as a user does, and its tasks, called as functions."""

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
from invoke import Context, Exit, MockContext, Result, Task

import tasks
from cluster.contract.run.folder import RunFolder
from cluster.system.files import ROOT


def invoke(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", *words]
    environment = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def context(remainder: str = "", exited: int = 0) -> MockContext:
    """Return a context that remembers commands instead of running them."""
    made = MockContext(run=Result(exited=exited), repeat=True)
    made._set(remainder=remainder)
    return made


def commands(c: MockContext) -> list[str]:
    return [call.args[0] for call in c.run.call_args_list]


def refusal(task: str, c: Context | None = None, /, **options: Any) -> tuple[int, str]:
    """Return the exit code and the message that a task ends with."""
    with pytest.raises(Exit) as ended:
        tasks.ns[task](c or context(), **options)
    return ended.value.code, ended.value.message or ""


def exit_code(task: str, /, *arguments: Any, **options: Any) -> int:
    try:
        tasks.ns[task](context(), *arguments, **options)
    except Exit as ended:
        return int(ended.code)
    return 0


def end_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the standard output a pipe whose reader has ended. pytest undoes this after a fixture."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))


def options(task: Task) -> dict[str, Any]:
    parameters = list(inspect.signature(task.body).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def current(run: RunFolder) -> RunFolder:
    """Make a run the current one."""
    (run.path.parent / ".current").write_text(run.name + "\n")
    return run
