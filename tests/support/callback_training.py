"""What trainings with callbacks have in common: their configuration, and a callback that records its calls."""

import dataclasses
import functools

from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json, read_json_lines
from train.config import Optimizer, TrainConfig

EXAMPLES, GLOBAL_BATCH = 18, 4
EPOCH_ENDS = (0, 5, 9, 14, 18, 23, 27, 32, 36, 41)
"""A batch may end one epoch and begin the next: epochs of 5 and of 4 steps, none of which drifts from the examples."""
CONFIG = TrainConfig(
    dataset="own_parts:data",
    loss="own_parts:loss",
    callbacks="own_parts:callbacks",
    global_batch=GLOBAL_BATCH,
    epochs=100,
    steps_per_loop=2,
    log_every=1,
    optimizer=Optimizer("sgd", 0.1, warmup_steps=0, momentum=0.0),
)


class Log:
    """What a recorder keeps; without `__dict__`, so that no checkpoint has it and each generation begins its own."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, float]]] = []


class Recorder(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self._log = Log()
        for part, index in (("train", (-1,)), ("epoch", ()), ("train_batch", ())):
            for end in ("begin", "end"):
                name = f"{part.removeprefix('train_')} {end}s"
                setattr(self, f"on_{part}_{end}", functools.partial(self._record, name, *index))

    def _record(self, name: str, index: int, logs: dict[str, float] | None) -> None:
        self._log.calls.append((name, index, dict(logs or {})))

    @property
    def names(self) -> list[tuple[str, int]]:
        """What it was called with, without logs."""
        return [one[:2] for one in self._log.calls]

    def logs(self, name: str) -> list[dict[str, float]]:
        return [logs for called, _, logs in self._log.calls if called == name]


@dataclasses.dataclass
class Trained:
    run: RunFolder
    recorder: Recorder

    @property
    def steps(self) -> int:
        return read_json(self.run.control / "result.json")["steps"]

    @property
    def rows(self) -> list[dict[str, float]]:
        return list(read_json_lines(self.run.metrics("chief")))


class Killed(Exception):
    """In place of a signal."""
