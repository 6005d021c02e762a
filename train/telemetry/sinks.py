"""Further receivers of metrics: `--log-to csv,mlflow,wandb`.

Each has a library, which a run installs by `--requirements`, except csv. Tasks have no network by default, so MLflow
and Weights & Biases write to the run folder unless their variables name a server (`--env`, `--network host`). A server
must answer when the training begins. Afterwards a thread sends the rows, and the training continues without the server.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Protocol

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.messages import counted, described
from train.config import TrainConfig

Row = dict[str, float | None]

WAITING = 10_000
"""Rows that are kept for a slow or unreachable server."""
BEGIN_S = 60.0
"""Longest wait for a server's first answer; the libraries retry for minutes."""
AGAIN_S = 1.0
"""Longest wait in a resumed training, which only a missing library ends."""
CLOSE_S = 20.0
"""Longest wait at the end for a server to receive all rows; shorter than the time a task has to stop."""


class Sink(Protocol):
    """Receiver of the rows of one task."""

    def log(self, step: int, values: Row) -> None:
        """Receive the values after a step."""

    def close(self) -> None:
        """Flush pending rows at the end of the training."""


class Csv:
    """`metrics/<task>.csv`: a row for each logged step, a column for each value."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Continue a file; rows after step `resumed_at` belong to lost steps and are deleted."""
        self._path, self._columns = path, ["step"]
        rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                # A killed task may have left half a row.
                rows = [row for row in reader if None not in row.values() and int(row["step"] or 0) <= resumed_at]
                self._columns = list(reader.fieldnames or self._columns)
        self._write(rows)

    def log(self, step: int, values: Row) -> None:
        """Append a row; new columns are added to all rows."""
        row: dict[str, Any] = {"step": step, **values}
        if new := [name for name in row if name not in self._columns]:
            with self._path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._write(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def close(self) -> None:
        """Do nothing, because every row is written immediately."""

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        scratch = self._path.with_suffix(".csv-scratch")
        with scratch.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        scratch.replace(self._path)


class MLflow:
    """An MLflow run with this run's name, which a resumed run continues."""

    def __init__(self, run: RunFolder, config: TrainConfig) -> None:
        """Start the MLflow run, in an SQLite file of the run folder unless MLFLOW_TRACKING_URI names a server."""
        self._mlflow = _library("mlflow")
        if not (server := os.environ.get("MLFLOW_TRACKING_URI")):
            (run.path / "mlflow").mkdir(exist_ok=True)
        self._mlflow.set_tracking_uri(server or f"sqlite:///{run.path.absolute()}/mlflow/mlflow.db")
        record = run.control / "mlflow"
        known = record.read_text() if record.exists() else None
        begun = self._mlflow.start_run(run_id=known, run_name=None if known else run.name)
        if not known:
            record.write_text(begun.info.run_id)
            self._mlflow.log_params(flat(config.to_json()))

    def log(self, step: int, values: Row) -> None:
        self._mlflow.log_metrics(_numbers(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Wandb:
    """A run of Weights & Biases with this run's name, which a resumed run continues."""

    def __init__(self, run: RunFolder, config: TrainConfig) -> None:
        """Start the run, offline in the run folder unless WANDB_API_KEY is set."""
        offline = "WANDB_API_KEY" not in os.environ
        self._run = _library("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "tf-cluster"),
            id=run.name,
            name=run.name,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline" if offline else "online"),
            dir=str(run.path),
            config=flat(config.to_json()),
        )

    def log(self, step: int, values: Row) -> None:
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Background:
    """Runs another sink in a thread, so that a slow or unreachable server neither delays nor ends the training."""

    def __init__(self, name: str, begin: Callable[[], Sink], *, required: bool = True) -> None:
        """Start the sink in the thread.

        Args:
            name: its name in `--log-to`.
            begin: creates the sink; called again for each row until it succeeds.
            required: whether it must start now; an unreachable server does not end a resumed training.
        """
        self._name, self._lost, self._error = name, 0, ""
        self._rows: queue.Queue[tuple[int, Row] | None] = queue.Queue(WAITING)
        begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._send, args=(begin, begun), daemon=True)
        self._thread.start()
        try:
            begun.result(BEGIN_S if required else AGAIN_S)
        except FutureTimeoutError:
            if required:
                raise TimeoutError(f"no answer in {BEGIN_S:.0f} s") from None
        except ClusterError:
            raise
        except Exception as error:
            if required:
                raise
            self._warn(described(error))

    def log(self, step: int, values: Row) -> None:
        """Queue the values for sending, without waiting."""
        try:
            self._rows.put_nowait((step, values))
        except queue.Full:
            self._lose("it does not keep up")

    def close(self) -> None:
        """Wait until all rows are sent, for at most `CLOSE_S`, and report those that are not."""
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if lost := self._lost + self._rows.qsize():
            self._print(f"{counted(lost, 'row')} not sent: {self._error or 'it does not answer'}")
        elif self._thread.is_alive():
            self._print(f"it did not end in {CLOSE_S:.0f} s")

    def _send(self, begin: Callable[[], Sink], begun: Future[None]) -> None:
        sink = None
        try:
            sink = begin()
            begun.set_result(None)
        except BaseException as error:
            begun.set_exception(error)
        while row := self._rows.get():
            try:
                sink = sink or begin()
                sink.log(*row)
            except Exception as error:  # the library may raise any class
                self._lose(described(error))
        try:
            if sink:
                sink.close()
        except Exception as error:
            self._print(f"it did not end: {described(error)}")

    def _lose(self, why: str) -> None:
        self._lost += 1
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._error:
            self._error = why
            self._print(f"{why}; the training continues, and its metrics are in the run folder")

    def _print(self, message: str) -> None:
        print(f"--log-to {self._name}: {message}", file=sys.stderr, flush=True)


SERVICES: dict[str, Callable[[RunFolder, TrainConfig], Sink]] = {"mlflow": MLflow, "wandb": Wandb}


def build(config: TrainConfig, run: RunFolder, task: str, resumed_at: int, *, chief: bool) -> list[Sink]:
    """Build the sinks that a configuration names: csv for every task, the others for the chief.

    Raises:
        PrerequisiteError: a sink's library is missing, or its server does not answer when the training begins.
    """
    sinks: list[Sink] = []
    for name in config.sinks:
        if name == "csv":
            sinks.append(Csv(run.metrics(task).with_suffix(".csv"), resumed_at))
        elif chief:
            sinks.append(_begin(name, run, config, required=not resumed_at))
    return sinks


def _begin(name: str, run: RunFolder, config: TrainConfig, *, required: bool) -> Sink:
    try:
        return Background(name, lambda: SERVICES[name](run, config), required=required)
    except ClusterError:
        raise
    except Exception as error:  # the library may raise any class
        raise PrerequisiteError(
            f"--log-to {name}: {described(error)}; tasks reach a server with --network egress in containers, --network "
            "host as local processes"
        ) from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PrerequisiteError(
            f"--log-to {name}: its library is missing ({error}); add --requirements requirements/{name}.lock"
        ) from None


def _numbers(values: Row) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to names such as `part.setting`."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result
