"""Numbers measured in separate processes, by programs in `tests/programs`.

They need several logical devices, a cluster, or Keras first without and then with the patches of `train/patches/`. A
process can choose each of these only once, and all other unit tests share pytest's process.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.system.ports import free_ports
from tests import fast
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}

HANG_S = 900.0
"""Time after which such a process counts as hung, even on a busy machine: normally it takes a minute or two."""


def begin(*words: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """Wait for a process of `begin`; return the end of its output."""
    try:
        return process.communicate(timeout=HANG_S)[0][-8000:]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it prints its threads' stacks
        return f"still running after {HANG_S:g} s\n{process.communicate()[0][-8000:]}"


def start(module: str, result: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `tests/programs/<module>.py`, which writes what it measured to `result`."""
    fast.leave_out("starts TensorFlow")
    environment = {**os.environ, **ENVIRONMENT, **environment}
    return begin(f"tests.programs.{module}", str(result), *arguments, environment=environment)


def finish(process: subprocess.Popen[str], result: Path) -> dict[str, Any]:
    output = output_of(process)
    assert 0 == process.returncode, output
    return json.loads(result.read_text())


def await_other_task(result: Path) -> None:
    """Wait until the other of two tasks has its result, too: it may still receive what this one has sent it."""
    wait_for(lambda: all((result.parent / f"{task}.json").exists() for task in range(2)), "the other task")


def measured_by_two(module: str, folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of `tests/programs/<module>.py` in each of two tasks of a cluster."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    tasks = {}
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        result = folder / f"{index}.json"
        tasks[result] = start(module, result, TF_CONFIG=config)
    try:
        return [finish(process, result) for result, process in tasks.items()]
    finally:
        for process in tasks.values():
            process.kill()  # one that waits for another that failed


@functools.cache
def measured(module: str, *arguments: str) -> dict[str, Any]:
    """Return the measurements of `tests/programs/<module>.py`, made once for all tests of this process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        return finish(start(module, result, *arguments), result)
