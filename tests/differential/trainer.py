"""Trains a case with our training program: planned as `up` plans, each task a fork of this process, killed on request.

The program, the plan and its checks are those of `up`; only agents are missing, so this starts generations itself.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.contract import user_code
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning, startup
from cluster.host.launch.plan import Plan
from cluster.host.options.request import Request
from cluster.host.runtime.payload import data_words
from cluster.system import fork_server
from cluster.system.errors import UsageError
from tests.differential.draw import Case, up

LIMIT_S = 240.0
"""What no task takes unless it hangs."""
DIED = -signal.SIGKILL


class Failed(Exception):
    """A task ended with an error; has the end of its log."""


def run_module(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Any:
    """Start a module in a fork of this process, its output appended to a log."""
    with log.open("ab") as file:
        return fork_server.start(list(command), env=dict(environment), stdout=file, stderr=file)


def use_forks() -> None:
    """Let the plan fork the programs that it asks about the user's code, instead of importing TensorFlow in each."""

    def run(command: Sequence[str], what: str, _setting: str, *, environment: Mapping[str, str], **_others: Any) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            file, log = Path(scratch) / "result.json", Path(scratch) / "log"
            process = run_module(command, log, {**environment, user_code.RESULT_FILE: str(file)})
            try:
                return user_code._read(file, what, process.wait(timeout=LIMIT_S))["value"]
            except UsageError as error:
                if "instead of returning" in str(error):  # it crashed
                    raise Failed(tail(log)) from None
                raise

    user_code.run = run


def plan(case: Case, module: str, name: str, **more: Any) -> Plan:
    """Plan a run of a case as `up` does: options, configuration, data, model and loss."""
    request = Request(name=name, runtime="local", tensorboard_port="0", network="host", **up(case, module), **more)
    planned = planning.plan(request)
    verb, *words = data_words(planned.config)
    folder = planned.data_dir
    command = [sys.executable, "-m", "train.data", verb, "--name", planned.config["dataset"], "--data-dir", str(folder)]
    user_code.run([*command, *words], "the data", "", environment=os.environ)
    return planned


def start(planned: Plan) -> RunFolder:
    """Check what `up` checks last, and write the run's folder."""
    stages = planned.try_configuration()
    planned.run.path.parent.mkdir(parents=True, exist_ok=True)
    startup._write_folder(planned, time.time(), stages.get("record"), "")
    return planned.run


def train(run: RunFolder, killed_at: Sequence[int] = ()) -> None:
    """Run all generations of a run: each but the last is killed once the chief has done so many steps."""
    for generation, step in enumerate([*killed_at, 0]):
        if generation:
            run.begin_generation(generation, resumed=False)
        ends = _generation(run, generation, step)
        logs = "".join(f"\n--- {name}: {code}{tail(run.path / f'{name}.log')}" for name, code in ends.items() if code)
        if (DIED in ends.values()) if step else not any(ends.values()):
            continue
        raise Failed(f"generation {generation} ended with {ends}{logs}")


def _generation(run: RunFolder, generation: int, killed_at: int) -> dict[str, int]:
    """Run one generation; return how each task that does not serve ended."""
    tasks, cluster = run.composed["tasks"], run.load_cluster()
    processes = {}
    for name, task in tasks.items():
        environment = {**os.environ, **task["environment"], "GENERATION": str(generation), "RESTARTS": str(generation)}
        environment |= {"RUN_DIR": str(run.path)}
        environment["KILLED_AT"] = str(killed_at if name == "chief" else 0)
        command = [sys.executable, "-m", "tests.differential.task", "--run-dir", str(run.path)]
        processes[name] = run_module(command, run.path / f"{name}.log", environment)
    ends: dict[str, int] = {}
    until = time.monotonic() + LIMIT_S
    trains = {task.name for task in cluster.tasks if not cluster.serves(task)}
    while trains - set(ends) and time.monotonic() < until:
        ends |= {name: process.poll() for name, process in processes.items() if process.poll() is not None}
        if any(ends.values()):
            break
        time.sleep(0.01)
    for name, process in processes.items():
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        if name in trains and name not in ends and not any(ends.values()):
            ends[name] = code
    return ends


def tail(log: Path) -> str:
    return "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else ""
