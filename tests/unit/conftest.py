"""Whole clusters of fake trainers: real agents as real processes under the real supervisor, without TensorFlow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster import local
from cluster.runs import RunFolder, read_json, write_json
from tests.waiting import wait_for


@dataclass(frozen=True)
class Gang:
    """A cluster under way."""

    run: RunFolder

    def summary(self) -> dict[str, Any]:
        """Wait for the run's end and that of all of its processes; return the summary."""
        wait_for(self.run.summary.exists, "the summary")
        wait_for(lambda: not local.processes_left(self.run), "the end of all processes")
        return read_json(self.run.summary)

    def outcome(self) -> dict[str, Any]:
        """Wait for the run's outcome and return it."""
        return wait_for(lambda: self.run.outcome, "the outcome")

    def beat(self, task: str) -> dict[str, Any]:
        """Return a task's last heartbeat."""
        return self.run.heartbeats().get(task, {"state": None, "step": 0})

    def await_step(self, task: str, step: int) -> None:
        """Wait until a task has done a step."""
        wait_for(lambda: self.beat(task)["step"] >= step, f"step {step} of {task}")

    def pid(self, task: str, of: str = "program") -> int:
        """Return the process id of a task's program or agent."""
        return read_json(self.run.path / "pids" / f"{task}.json")[of]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [found for found in self.run.events() if found["event"] == event]


@pytest.fixture
def start_gang(make_run: Callable[..., RunFolder], tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    """Starts a cluster whose every task runs the given lines of Python.

    `imports` goes before the lines; `absent` tasks are in the cluster but never started; `stopped` asks the run to stop
    before it starts; the other options are `spec.build`'s.
    """
    started = []

    def start(
        lines: str,
        imports: str = "from tests.unit.trainer import *",
        absent: tuple[str, ...] = (),
        stopped: bool = False,
        **topology: Any,
    ) -> Gang:
        run = make_run(**topology)
        program = [sys.executable, "-c", f"{imports}\n{lines}"]
        how = local.processes_of(run.load_cluster(), run.path, tmp_path / "data", ["--", *program])
        write_json(run.compose, how | {"tasks": {n: task for n, task in how["tasks"].items() if n not in absent}})
        if stopped:
            run.request_stop("a test")
        started.append(run)
        local.start(run)
        return Gang(run)

    yield start
    for run in started:
        with contextlib.suppress(FileNotFoundError):
            local.kill(run)
