"""TensorBoard, one for all runs of a folder, in a container or as a local process."""

import os
import shlex
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.contract.run import claim, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Process
from cluster.contract.run.logs import last_line
from cluster.contract.schema import Count, Record, dictionary
from cluster.host.runtime import compose_runtime
from cluster.host.runtime.base import path_digest
from cluster.host.runtime.payload import with_variables
from cluster.system import processes
from cluster.system.errors import PrerequisiteError, TimedOut
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from cluster.system.messages import COMMAND
from cluster.system.ports import open_listener
from cluster.system.waiting import wait_until

AUTO = "auto"
PORT = 6006
FREE_PORTS = 100
START_TIMEOUT_S = 60.0
ANSWER_S = 1.0
POLL_S = 0.2
PROGRAM = ROOT / "docker" / "board.py"
PROCESS, CONTAINER = "local", "docker"
"""The ways to run TensorBoard; `Runtime.board` is one of them."""


def address(port: int) -> str:
    """Return TensorBoard's URL for a browser."""
    return f"http://127.0.0.1:{port}"


def compose_project(runs_dir: Path) -> str:
    """Return the Compose project of the TensorBoard that shows a folder of runs."""
    return f"tf-cluster-tensorboard-{path_digest(runs_dir)}"


def compose_command(runs_dir: Path, port: int, *words: str) -> str:
    """Return a `docker compose` command for the TensorBoard of `runs_dir`, on 127.0.0.1:`port`."""
    variables = {"RUNS_DIR": str(runs_dir), "TENSORBOARD_PORT": str(port), "TASK_USER": compose_runtime.task_user()}
    command = [*compose_runtime.OUR_COMPOSE, "-p", compose_project(runs_dir), "--profile", "tensorboard", *words]
    return with_variables(variables, shlex.join(command))


def running_port(runs_dir: Path) -> int | None:
    """Return the port of the running TensorBoard of a folder of runs; None if none runs."""
    if (record := _record(runs_dir)) is None:
        return None
    runs = processes.alive(record["process"]) if record["runtime"] == PROCESS else _container_runs(runs_dir)
    return int(record["port"]) if runs else None


def port_problem(runs_dir: Path, port: int) -> str:
    """Return why the port cannot be used; empty if it is free, or used by the folder's TensorBoard."""
    if running_port(runs_dir) != port:
        try:
            open_listener("127.0.0.1", port).close()
        except OSError as error:
            forbidden = isinstance(error, PermissionError)
            problem = "may not be used by this user" if forbidden else "is in use by another program"
            return f"port 127.0.0.1:{port} {problem} ({error.strerror})"
    return ""


def start(
    runs_dir: Path,
    port: int | None,
    board: str,
    sh: Callable[[str], object],
    *,
    preferred: int | None = None,
    while_waiting: Callable[[], object] = lambda: None,
) -> int:
    """Start TensorBoard unless it runs, and wait for its answer; return its port: `port`, `preferred` or a free one."""
    with claim.hold_claim(RunFolder(runs_dir / ".tensorboard"), "started", wait_s=START_TIMEOUT_S):
        other = running_port(runs_dir)
        if other is not None and port in (None, other):
            return other
        first = preferred or PORT
        candidates = (first, *range(PORT, PORT + FREE_PORTS))  # if all are taken, report the first
        port = port or next((number for number in candidates if not port_problem(runs_dir, number)), first)
        if problem := port_problem(runs_dir, port):
            raise PrerequisiteError(f"{problem}; choose another one: --port 6007, or leave it out")
        if other is not None:
            _stop(runs_dir, sh)
        record: dict[str, Any] = {"runtime": board, "port": port}
        if board == CONTAINER:
            write_json(_record_path(runs_dir), record)  # first, for the leftovers of a failed start
            sh(compose_command(runs_dir, port, *compose_runtime.UP, "tensorboard"))
        else:
            record["process"] = processes.identity(_start_process(runs_dir, port))
            write_json(_record_path(runs_dir), record)
        _await_answer(runs_dir, port, record.get("process"), while_waiting)
        return port


def stop(runs_dir: Path, sh: Callable[[str], object]) -> bool:
    """End the TensorBoard of a folder of runs; return whether one was running."""
    if _record(runs_dir) is None:
        return False
    with claim.hold_claim(RunFolder(runs_dir / ".tensorboard"), "ended", wait_s=START_TIMEOUT_S):
        return _stop(runs_dir, sh)


def _stop(runs_dir: Path, sh: Callable[[str], object]) -> bool:
    if (record := _record(runs_dir)) is None:
        return False
    if record["runtime"] == CONTAINER:
        ended = _container_runs(runs_dir)
        command = compose_command(runs_dir, record["port"], "down", "--timeout", "5", "--volumes")
        compose_runtime.run_ending(command, sh, "TensorBoard is in a container, which may continue")
    else:
        ended = processes.end(record["process"])
    _record_path(runs_dir).unlink(missing_ok=True)
    return ended


def _record_path(runs_dir: Path) -> Path:
    return runs_dir / ".tensorboard.json"


class _Board(Record):
    runtime: str
    port: Count
    process: Process | None = None


def _record(runs_dir: Path) -> dict[str, Any] | None:
    record = records.read_record(_record_path(runs_dir), dictionary(_Board), None)
    return record if record and (record["runtime"] == CONTAINER or record["process"]) else None


def _container_runs(runs_dir: Path) -> bool:
    return compose_runtime.is_running(compose_project(runs_dir))


def _start_process(runs_dir: Path, port: int) -> int:
    command = [sys.executable, str(PROGRAM), "--logdir", str(runs_dir), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--reload_interval", "5"]
    environment = os.environ | {"TENSORBOARD_RUNS": str(runs_dir)}
    with (runs_dir / ".tensorboard.log").open("wb") as log:
        return processes.start_detached(command, environment=environment, output=log).pid


def _await_answer(
    runs_dir: Path, port: int, process: dict[str, int] | None, while_waiting: Callable[[], object]
) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches this machine's loopback

    def answers() -> bool:
        if process and not processes.alive(process):
            printed = last_line(runs_dir / ".tensorboard.log").strip() or "it printed nothing"
            raise PrerequisiteError(f"TensorBoard ended at once: {printed}")
        try:
            with direct.open(f"{address(port)}/data/logdir", timeout=ANSWER_S):
                return True
        except OSError:
            while_waiting()
            return False

    if not wait_until(answers, START_TIMEOUT_S, POLL_S):
        place = f"{runs_dir / '.tensorboard.log'} or `docker logs` of its container, then `{COMMAND} tensorboard`"
        raise TimedOut(f"TensorBoard did not answer on {address(port)} in {START_TIMEOUT_S:g} s; see {place}")
