"""The evaluator task: every new checkpoint once, over all generations, and nothing unreadable stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.system.json_files import read_json_lines
from tests.support.waiting import wait_for
from train import evaluator
from train.config import TrainConfig
from train.saving import checkpoint_files, saved_weights
from train.saving.checkpoint_files import Saved, write_checkpoint


def model_of(value: float) -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([1, 1], value, np.float32)])
    return model


class Evaluator:
    """An evaluator in a thread; its loss is the weight of the model."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.stop = run, threading.Event()
        model, task = model_of(0.0), run.load_cluster().task("evaluator")
        self.context: Any = SimpleNamespace(
            run=run,
            task=task,
            config=TrainConfig(),
            source=SimpleNamespace(train_examples=1000),
            model=model,
            heartbeat=HeartbeatWriter(run, task, 0),
            stop=self.stop,
            new_evaluation=lambda: lambda: {"eval_loss": float(model.get_weights()[0][0, 0])},
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        try:
            evaluator.evaluate_checkpoints(self.context)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Ask it to stop; it must, soon and well."""
        self.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()
        assert self.error is None


@pytest.fixture
def run(make_run: Callable[..., RunFolder]) -> RunFolder:
    return make_run("demo", workers=1, evaluator=True)


@pytest.fixture
def evaluating(run: RunFolder) -> Iterator[Callable[[], Evaluator]]:
    started: list[Evaluator] = []

    def start() -> Evaluator:
        started.append(Evaluator(run))
        return started[-1]

    yield start
    for one in started:
        one.stop.set()
        one.thread.join(20)


def save(run: RunFolder, *steps: int) -> None:
    """Save checkpoints whose weights are their steps."""
    for step in steps:
        write_checkpoint(tf.train.Checkpoint(model=model_of(step)), Saved(run.checkpoints, step))


def rows(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in read_json_lines(run.metrics("evaluator"))]


def test_each_new_checkpoint_is_evaluated_once_over_all_generations(run, evaluating):
    save(run, 10)
    first = evaluating()
    wait_for(lambda: rows(run) == [(10, 10.0)], "the first row")
    save(run, 20)
    wait_for(lambda: rows(run) == [(10, 10.0), (20, 20.0)], "the second row")
    first.end()
    again = evaluating()
    save(run, 30)
    wait_for(lambda: len(rows(run)) > 2, "a third row")
    again.end()
    assert [(10, 10.0), (20, 20.0), (30, 30.0)] == rows(run)


def test_the_last_checkpoint_is_evaluated_before_a_stop(run, evaluating):
    one = evaluating()
    save(run, 10, 20)
    one.end()
    assert (20, 20.0) == rows(run)[-1]


@pytest.mark.parametrize("name", ["ckpt-20.index", "ckpt-20.data-00000-of-00001", "ckpt-20.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\0" * path.stat().st_size)])
def test_an_unreadable_checkpoint_is_skipped_and_read_once(run, evaluating, monkeypatch, damage, name):
    save(run, 10, 20)
    damage(run.checkpoints / name)
    looks, whole = [0], []
    look, read = checkpoint_files.list_finished, Saved.damage

    def counted(folder: Path) -> list[Saved]:
        looks[0] += 1
        return look(folder)

    monkeypatch.setattr(evaluator, "list_finished", counted)
    monkeypatch.setattr(Saved, "damage", lambda saved, **how: (whole.append(saved.step), read(saved, **how))[1])
    monkeypatch.setattr(evaluator, "POLL_S", 0.01)
    one = evaluating()
    wait_for(lambda: looks[0] > 10, "some rounds")
    assert [(10, 10.0)] == rows(run)
    assert whole.count(20) <= 1
    save(run, 30)
    wait_for(lambda: rows(run) == [(10, 10.0), (30, 30.0)], "the row of a good one")
    one.end()


def test_a_checkpoint_that_vanishes_while_it_is_read_is_ignored(run, evaluating, monkeypatch, capsys):
    save(run, 10)
    read = saved_weights.load_evaluated

    def pruned(config: TrainConfig, model: keras.Model, prefix: str) -> None:
        Saved(run.checkpoints, 10).remove()
        read(config, model, prefix)

    monkeypatch.setattr(saved_weights, "load_evaluated", pruned)
    one = evaluating()
    wait_for(lambda: not Saved(run.checkpoints, 10).record.exists(), "the checkpoint to vanish")
    save(run, 20)
    wait_for(lambda: rows(run) == [(20, 20.0)], "the row of the next one")
    one.end()
    assert "warning" not in capsys.readouterr().out
