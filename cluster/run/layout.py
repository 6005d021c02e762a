"""The layout of a run folder: where each file of a run is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """The paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved training configuration."""
        return self.path / "config.json"

    @property
    def cluster(self) -> Path:
        """The description of the cluster."""
        return self.path / "cluster.json"

    @property
    def stages(self) -> Path:
        """Where a pipeline's model is cut, and what its blocks were measured to take."""
        return self.path / "stages.json"

    @property
    def compose(self) -> Path:
        """How the tasks were started: the Compose overlay, or the list of local processes."""
        return self.path / "compose.json"

    @property
    def manifest(self) -> Path:
        """Everything that determines the run's result: options, code, data, packages."""
        return self.path / "manifest.json"

    @property
    def environment(self) -> Path:
        """The hardware and software that the chief ran on."""
        return self.path / "environment.json"

    @property
    def summary(self) -> Path:
        """How the run ended; missing until then."""
        return self.path / "summary.json"

    @property
    def card(self) -> Path:
        """What ran and how it ended, to be read by people; missing until then."""
        return self.path / "README.md"

    @property
    def events_log(self) -> Path:
        """The run's life cycle, a JSON object per line."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The shared checkpoint folder."""
        return self.path / "checkpoints"

    @property
    def init(self) -> Path:
        """The weights that training begins with, if they are not random."""
        return self.path / "init"

    @property
    def export(self) -> Path:
        """The SavedModel written at the end."""
        return self.path / "export"

    @property
    def control(self) -> Path:
        """The messages between agents: generations, the stop request, the outcome."""
        return self.path / "control"

    @property
    def stop(self) -> Path:
        """The request to save and stop."""
        return self.control / "stop.json"

    @property
    def withdrawn_stop(self) -> Path:
        """The generation in which a stop request was withdrawn."""
        return self.control / "withdrawn.json"

    @property
    def scratch(self) -> Path:
        """What a script's containers use as /tmp.

        It is outside the run's folder: the engine follows links on the way to what it mounts, and a task could put one
        there.
        """
        return self.path.parent / ".scratch" / self.name

    @property
    def trace_request(self) -> Path:
        """The request for a trace of a task's next steps. The task removes it once it has answered."""
        return self.control / "trace.json"

    @property
    def trace_answer(self) -> Path:
        """The answer to the newest request for a trace."""
        return self.control / "traced.json"

    def status(self, task: str) -> Path:
        """The task's heartbeat."""
        return self.path / "status" / f"{task}.json"

    def metrics(self, task: str) -> Path:
        """The task's logged steps, a JSON object per line."""
        return self.path / "metrics" / f"{task}.jsonl"

    def programs(self, task: str) -> Path:
        """The identities of the newest attempt's processes, as the task itself sees them."""
        return self.control / "programs" / f"{task}.json"

    def away(self, task: str) -> Path:
        """There while a fault keeps the task away, so that its supervisor does not bring it back."""
        return self.control / "away" / task

    def log(self, task: str) -> Path:
        """The output of the task's program."""
        return self.path / "logs" / f"{task}.log"

    def work(self, task: str) -> Path:
        """The working folder of the task's script."""
        return self.path / "work" / task

    def tensorboard(self, task: str) -> Path:
        """The task's TensorBoard event files."""
        return self.path / "tensorboard" / task

    def timeline(self, task: str) -> Path:
        """When the task's stages of a pipeline computed what, of some steps."""
        return self.path / "timeline" / f"{task}.json"

    def traces(self, task: str) -> list[Path]:
        """Return the folders of the task's profiler traces, oldest first."""
        return sorted((self.tensorboard(task) / "plugins" / "profile").glob("*/"))

    def ledger(self, generation: int) -> Path:
        """What the chief spent its time on in a generation."""
        return self.control / "lives" / f"{generation}.json"
