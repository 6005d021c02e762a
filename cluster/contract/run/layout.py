"""The layout of a run folder: the path of each of its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class _Within:
    """Descriptor of `Paths` for one path within the run folder."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, paths: Paths, owner: type[Paths]) -> Path:
        return paths.path.joinpath(*self._parts)


class _Each:
    """Descriptor of `Paths` for a function from a task's name, or a generation, to a path within the run folder."""

    def __init__(self, folder: str, name: str = "{}") -> None:
        self._folder, self._name = folder, name

    def __get__(self, paths: Paths, owner: type[Paths]) -> Callable[[object], Path]:
        return lambda which: paths.path / self._folder / self._name.format(which)


@dataclass(frozen=True)
class Paths:
    """The paths of one run."""

    path: Path

    unfinished = _Within(".unfinished")
    """Exists while the folder is being created or deleted."""
    config = _Within("config.json")
    """The resolved training configuration."""
    cluster = _Within("cluster.json")
    """The description of the cluster."""
    stages = _Within("stages.json")
    """The stages into which a pipeline's model is cut."""
    compose = _Within("compose.json")
    """How the tasks were started: the Compose overlay, or the list of local processes."""
    manifest = _Within("manifest.json")
    """Everything that determines the run's result: options, code, data, packages."""
    environment = _Within("environment.json")
    """The hardware and software that the chief ran on."""
    summary = _Within("summary.json")
    """How the run ended; missing until then."""
    card = _Within("README.md")
    """The run's card, a readable summary with the configuration; missing until the end."""
    events_log = _Within("events.jsonl")
    """The run's events, a JSON object per line."""
    checkpoints = _Within("checkpoints")
    """The shared checkpoint folder."""
    init = _Within("init")
    """The initial weights, if they are not random."""
    export = _Within("export")
    """The SavedModel written at the end."""
    control = _Within("control")
    """The records that agents share: generations, the stop request, the outcome."""
    stop = _Within("control", "stop.json")
    """The request to save and stop."""
    gang = _Within("control", "gang.json")
    """The address of the agents' hub."""
    data_version = _Within("control", "data.json")
    """The version of the data, which every generation uses even if a newer one exists."""
    token = _Within("control", "token.json")
    """The shared secret with which the run's agents authenticate each other."""
    withdrawn_stop = _Within("control", "withdrawn.json")
    """The generation in which a stop request was withdrawn."""
    board = _Within("control", "tensorboard.json")
    """The port of the run's TensorBoard."""
    trace_request = _Within("control", "trace.json")
    """The request for a trace of a task's next steps. The task removes it after answering."""
    trace_answer = _Within("control", "traced.json")
    """The answer to the newest request for a trace."""

    status = _Each("status", "{}.json")
    """A task's heartbeat."""
    metrics = _Each("metrics", "{}.jsonl")
    """A task's logged steps, a JSON object per line."""
    log = _Each("logs", "{}.log")
    """The output of a task's program."""
    work = _Each("work")
    """The working folder of a task's script."""
    tensorboard = _Each("tensorboard")
    """A task's TensorBoard event files."""
    programs = _Each("control/programs", "{}.json")
    """The identities of a task's current processes, in the task's own process namespace."""
    away = _Each("control/away")
    """Exists while an injected fault keeps the task away, so that its supervisor does not restart it."""
    flip_request = _Each("control", "flip-{}")
    """Exists while an injected fault requests that the task flips a bit of its weights."""
    ledger = _Each("control/ledgers", "{}.json")
    """The chief's time in a generation, by activity."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def scratch(self) -> Path:
        """The folder that a script's containers use as /tmp.

        It is outside the run folder: the engine follows links in the path of a mount, and a task could create one
        inside.
        """
        return self.path.parent / ".scratch" / self.name

    def outside(self, kind: str) -> Path:
        """Return the path of a record about the run outside its folder, where no container can write."""
        return self.path.parent / ".running" / f"{self.name}.{kind}"

    def traces(self, task: str) -> list[Path]:
        """Return the folders of the task's profiler traces, oldest first."""
        return sorted((self.tensorboard(task) / "plugins" / "profile").glob("*/"))
