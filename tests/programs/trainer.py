"""A training program without TensorFlow, to test what starts and watches one: heartbeats, events, deaths on demand.

It passes the gate when it is imported. Tests write a few lines after `from tests.programs.trainer import *`.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cluster.contract.recovery import standby_cluster
from cluster.contract.recovery.step_record import StepRecord
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.records import Heartbeat, Place, Position
from cluster.system.json_files import read_json, write_json
from tests.support.doors import GREETING

__all__ = [
    "GENERATION", "NAME", "RESTARTS",
    "die", "exchange", "finish", "meet", "os", "run", "serve", "sys", "train", "until", "work",
]  # fmt: skip

EXIT_PEER_LOST = 75
CHECKPOINT = 2
"""The step that every generation but the first starts after."""

if standby_cluster.VARIABLE in os.environ:
    _generation, _number = int(os.environ["GENERATION"]), int(os.environ[standby_cluster.NUMBER])
    standby_cluster.report_ready(RunFolder(Path(os.environ["RUN_DIR"])), os.environ["TASK"], _generation, _number)
if "STANDBY_PROCESS" in os.environ:  # the attempt is known only once it begins
    os.environ |= json.loads(os.fdopen(int(os.environ["GATE_FD"]), "rb").readline() or sys.exit(EXIT_PEER_LOST))
run = RunFolder(Path(os.environ["RUN_DIR"]))
NAME, GENERATION, RESTARTS = os.environ["TASK"], int(os.environ["GENERATION"]), int(os.environ["RESTARTS"])
CHIEF = NAME == "chief"

_heartbeat = HeartbeatWriter(run, run.load_cluster().task(NAME), GENERATION, RESTARTS)
_record = StepRecord(run, NAME, GENERATION)
_step = CHECKPOINT if GENERATION else 0
_stop: list[int] = []


def train(to: int) -> None:
    """Do the steps up to `to`."""
    global _step
    while _step < to:
        _step += 1
        _record.done(_step)
        _heartbeat.update(state="training", step=_step)
        _heartbeat.write()
        if CHIEF and _step == (CHECKPOINT if GENERATION else 0) + 1:
            run.event(NAME, "first step", step=_step)


def exchange() -> None:
    """Enter the gradient exchange of the next step."""
    began, entered = time.monotonic(), Position(place=Place.EXCHANGE, step=_step + 1, left=False, seconds=0.0)
    _heartbeat.position = lambda: replace(entered, seconds=time.monotonic() - began)


def finish(state: str = "done") -> NoReturn:
    """End well: the chief leaves a result."""
    if CHIEF:
        write_json(run.control / "result.json", {"steps": _step, "metrics": {"eval_accuracy": 0.9}})
    _heartbeat.update(state=state)
    _heartbeat.stop()
    os._exit(0)  # at once, like the real program: a signal could still end the interpreter's own teardown


def work(saving_s: float = 0.0) -> NoReturn:
    """Train until asked to stop; save and stop as the real program does."""
    _heartbeat.update(state="training")
    until(lambda: _stop)
    time.sleep(saving_s)
    finish("stopped")


def serve() -> NoReturn:
    """Do what others ask for, like a parameter server: it never ends by itself, and has nothing to save."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _heartbeat.update(state="training")
    until(lambda: False, timeout_s=300)
    sys.exit("nobody ended this server")


def meet() -> None:
    """Wait until every other task has come to train in this generation."""
    for task in membership.cluster(run, GENERATION).tasks:
        until(lambda name=task.name: name == NAME or _trains(run.heartbeats().get(name)))


def _trains(beat: Heartbeat | None) -> bool:
    return beat is not None and beat.state in ("training", "done") and beat.generation == GENERATION


def _listen() -> None:
    """Speak HTTP/2 where TensorFlow's server would: on every interface, whatever address the task has."""
    port, both = run.load_cluster().task(NAME).port, socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as server:
        while True:
            caller, _ = server.accept()
            with caller:
                caller.recv(64)
                caller.sendall(GREETING)


def die(number: int = signal.SIGKILL) -> None:
    """End by a signal, after the last words."""
    print(f"{NAME} dies of {signal.Signals(number).name}", flush=True)
    os.kill(os.getpid(), number)


def until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    """Wait for something that other tasks do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"{NAME} waited {timeout_s:g} s for nothing")
        time.sleep(0.01)


signal.signal(signal.SIGTERM, lambda *_: _stop.append(1))
write_json(
    run.path / "pids" / f"{NAME}.json", {"program": os.getpid(), "agent": os.getppid(), "generation": GENERATION}
)
if "STANDBY_PROCESS" not in os.environ and not os.fdopen(int(os.environ["GATE_FD"]), "rb").readline():
    sys.exit(EXIT_PEER_LOST)
threading.Thread(target=_listen, daemon=True).start()
_heartbeat.start()
if CHIEF and GENERATION:
    run.event(NAME, "restored", step=read_json(run.path / "restored.json", CHECKPOINT))
