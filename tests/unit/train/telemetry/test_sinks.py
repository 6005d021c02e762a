"""Metric sinks: CSV as it is, the services through stand-ins for their libraries, which are no requirement."""

import csv
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import PrerequisiteError
from train.config import TrainConfig
from train.telemetry import sinks
from train.telemetry.metrics import Metrics


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_step_and_a_column_a_value(make_run):
    run = make_run()
    (sink,) = sinks.build(TrainConfig(log_to="csv"), run, "worker-0", 0, chief=False)
    metrics = Metrics(run, "worker-0", prints=False, sinks=[sink])
    metrics.log(1, 0.5, 2, {"loss": 2.5, "examples_per_s": None})
    metrics.log(2, 1.0, 2, {"eval_loss": 1.5})
    metrics.close()
    assert [
        {"step": "1", "epoch": "0.5", "loss": "2.5", "examples_per_s": "", "eval_loss": ""},
        {"step": "2", "epoch": "1.0", "loss": "", "examples_per_s": "", "eval_loss": "1.5"},
    ] == rows(run.path / "metrics" / "worker-0.csv")


def test_csv_continues_after_the_last_step_that_was_not_lost(tmp_path):
    path = tmp_path / "chief.csv"
    first = sinks.Csv(path, 0)
    for step in (1, 2, 3):
        first.log(step, {"loss": step / 2})
    with path.open("a") as file:
        file.write("4")  # killed while it wrote
    again = sinks.Csv(path, 2)
    again.log(3, {"loss": 9.0})
    assert [("1", "0.5"), ("2", "1.0"), ("3", "9.0")] == [(row["step"], row["loss"]) for row in rows(path)]


class Library(SimpleNamespace):
    """Stands in for a service's library: notes what it is called with."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def __getattr__(self, name: str) -> Any:
        def called(*given: Any, **options: Any) -> Any:
            self.calls.append((name, *given, options))
            return SimpleNamespace(info=SimpleNamespace(run_id="id-7")) if name == "start_run" else self

        return called


def test_mlflow_continues_its_run(make_run, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, config = make_run("demo"), TrainConfig(log_to="mlflow")
    for known in (None, "id-7"):
        monkeypatch.setitem(sys.modules, "mlflow", library := Library())
        (sink,) = sinks.build(config, run, "chief", 0, chief=True)
        sink.log(3, {"loss": 0.5, "examples_per_s": None})
        sink.close()
        calls = {call[0]: call[1:] for call in library.calls}
        assert (f"sqlite:///{run.path}/mlflow/mlflow.db", {}) == calls["set_tracking_uri"]
        assert ({"run_id": known, "run_name": None if known else "demo"},) == calls["start_run"]
        assert ({"loss": 0.5}, {"step": 3}) == calls["log_metrics"]
        assert (known is None) == ("log_params" in calls)
        assert "end_run" in calls


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("secret", "online")])
def test_wandb_is_offline_without_a_key(make_run, monkeypatch, key, mode):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setitem(sys.modules, "wandb", library := Library())
    run = make_run("demo")
    (sink,) = sinks.build(TrainConfig(log_to="wandb"), run, "chief", 0, chief=True)
    sink.log(3, {"loss": 0.5})
    sink.close()
    (begun, logged, ended) = library.calls
    options = begun[-1]
    assert ("demo", "allow", mode, str(run.path)) == tuple(options[name] for name in ("id", "resume", "mode", "dir"))
    assert options["config"]["optimizer.name"] == "adam"
    assert ("log", {"loss": 0.5}, {"step": 3}) == logged
    assert "finish" == ended[0]


class Server:
    """A sink that fails at one step, and at another waits until it is released."""

    def __init__(self, fails_at: int = 0, waits_at: int = 0) -> None:
        self.fails_at, self.waits_at, self.released, self.steps = fails_at, waits_at, threading.Event(), [0]

    def log(self, step: int, values: dict[str, float | None]) -> None:
        if step == self.waits_at:
            self.released.wait()
        if step == self.fails_at:
            raise ConnectionError("refused")
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def test_a_service_that_fails_costs_rows_and_not_the_training(capsys):
    server = Server(fails_at=2)
    sink = sinks.Background("mlflow", lambda: server)
    for step in (1, 2, 3):
        sink.log(step, {})
    sink.close()
    assert [0, 1, 3, -1] == server.steps
    said = capsys.readouterr().err.splitlines()
    assert 2 == len(said)
    assert all("--log-to mlflow" in line and "refused" in line for line in said)


def test_a_hanging_service_delays_neither_the_training_nor_its_end(capsys, monkeypatch):
    monkeypatch.setattr(sinks, "WAITING", 2)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    server = Server(waits_at=1)
    sink = sinks.Background("wandb", lambda: server)
    for step in range(1, 6):
        sink.log(step, {})
    sink.close()
    assert [0] == server.steps
    assert "rows not sent" in capsys.readouterr().err
    server.released.set()


def test_an_unreachable_service_does_not_end_a_resumed_training(make_run, monkeypatch):
    server, answers = Server(), iter([False, False, True])

    def begin(run: RunFolder, config: TrainConfig) -> Server:
        if not next(answers):
            raise ConnectionError("refused")
        return server

    monkeypatch.setitem(sinks.SERVICES, "mlflow", begin)
    (sink,) = sinks.build(TrainConfig(log_to="mlflow"), make_run(), "chief", 40, chief=True)
    for step in (41, 42):
        sink.log(step, {})
    sink.close()
    assert [0, 42, -1] == server.steps


def test_a_service_that_does_not_begin_ends_the_run_at_once(make_run, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(sinks, "BEGIN_S", 0.05)
    monkeypatch.setitem(sinks.SERVICES, "mlflow", lambda run, config: never.wait())
    with pytest.raises(PrerequisiteError, match="--log-to mlflow"):
        sinks.build(TrainConfig(log_to="mlflow"), make_run(), "chief", 0, chief=True)
    never.set()


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_library_that_is_missing_is_named(make_run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrerequisiteError, match=f"--log-to {name}: its library is missing"):
        sinks.build(TrainConfig(log_to=name), make_run(), "chief", 0, chief=True)
