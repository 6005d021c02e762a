"""A running cluster of fake trainers: real agent processes under the real supervisor, without TensorFlow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Event, Heartbeat, Outcome, TaskState
from cluster.host.runtime import supervisor
from cluster.system.json_files import read_json
from tests.support.waiting import wait_for

SIGKILLED = "exit code 137 (SIGKILL: killed)"


def assert_ended(summary: dict[str, Any], **values: Any) -> None:
    """Check every key of the summary of a run on workers; `values` are those that differ from a run without a step."""
    assert 0 < summary.pop("startup_s") <= summary.pop("wall_s")
    empty = ("epochs", "examples_per_s", "weights_sha256", "goodput", "goodput_split", "checkpoint_every_s")
    usual = {"strategy": "MultiWorkerMirroredStrategy", "steps": 0, "metrics": {}, "restarts": []}
    pace = {"tasks": {}, "stragglers": [], "starved": []}
    assert dict.fromkeys(empty) | usual | {"pace": pace} | values == summary


@dataclass(frozen=True)
class Gang:
    run: RunFolder

    def summary(self) -> dict[str, Any]:
        """Wait for the end of the run and of all its processes; return the summary."""
        wait_for(self.run.summary.exists, "the summary", timeout_s=300)
        wait_for(lambda: not supervisor.processes_left(self.run), "the end of all processes", timeout_s=300)
        return read_json(self.run.summary)

    def outcome(self) -> Outcome:
        return wait_for(lambda: self.run.outcome, "the outcome")

    def beat(self, task: str) -> Heartbeat:
        return self.run.heartbeat(task) or Heartbeat(task=task, state=TaskState.STARTING, updated_at=0.0)

    def await_step(self, task: str, step: int) -> None:
        wait_for(lambda: self.beat(task).step >= step, f"step {step} of {task}")

    def pid(self, task: str, of: str = "program") -> int:
        return read_json(self.run.path / "pids" / f"{task}.json")[of]

    @property
    def keeper(self) -> dict[str, int]:
        """The identity of the run's first process."""
        owned = owner.read_owner(self.run)
        assert owned
        assert owned.supervisor
        return owned.supervisor

    def events(self, event: str) -> list[Event]:
        return [found for found in self.run.events() if found.event == event]


StartGang = Callable[..., Gang]
"""Takes the lines of the fake trainer; see the fixture `start_gang`."""
