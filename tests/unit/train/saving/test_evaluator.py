"""The evaluator task: every new checkpoint once, over all generations, and nothing unreadable stops it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.recovery.checkpoint_files import Saved, write_checkpoint
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.system.json_files import read_json_lines
from train import __main__, evaluator
from train.config import TrainConfig
from train.saving import saved_weights


def model_of(value: float) -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([1, 1], value, np.float32)])
    return model


class Stop:
    """A stop after some events, one of which happens whenever the evaluator has nothing to do."""

    def __init__(self, events: tuple[Callable[[], object], ...]) -> None:
        self.events = list(events)

    def is_set(self) -> bool:
        return not self.events

    def wait(self, _seconds: float) -> None:
        self.events.pop(0)()


def evaluate(run: RunFolder, *events: Callable[[], object]) -> None:
    """Run an evaluator whose loss is the weight of the model, until it ends."""
    model, task = model_of(0.0), run.load_cluster().task("evaluator")
    own = {"run": run, "task": task, "model": model, "heartbeat": HeartbeatWriter(run, task, 0), "stop": Stop(events)}
    context: Any = SimpleNamespace(config=TrainConfig(), source=SimpleNamespace(train_examples=1000), **own)
    context.new_evaluation = lambda: lambda: {"eval_loss": float(model.get_weights()[0][0, 0])}
    evaluator.evaluate_checkpoints(context)


@pytest.fixture
def run(make_run: Callable[..., RunFolder]) -> RunFolder:
    return make_run("demo", workers=1, evaluator=True)


def save(run: RunFolder, *steps: int) -> None:
    """Save checkpoints whose weights are their steps."""
    for step in steps:
        write_checkpoint(tf.train.Checkpoint(model=model_of(step)).write, Saved(run.checkpoints, step))


def rows(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in read_json_lines(run.metrics("evaluator"))]


def test_each_new_checkpoint_is_evaluated_once_over_all_generations(run):
    save(run, 10)
    evaluate(run, lambda: save(run, 20))
    assert [(10, 10.0), (20, 20.0)] == rows(run)
    evaluate(run, lambda: save(run, 30))
    assert [(10, 10.0), (20, 20.0), (30, 30.0)] == rows(run)


def test_the_last_checkpoint_is_evaluated_before_a_stop_or_after_the_end(run):
    save(run, 10, 20)
    evaluate(run)
    assert [(20, 20.0)] == rows(run)
    save(run, 30)
    run.end("succeeded")
    evaluate(run, lambda: pytest.fail("the run has ended"))
    assert [(20, 20.0), (30, 30.0)] == rows(run)


def test_an_evaluator_is_not_ended_during_its_imports(run, monkeypatch):
    monkeypatch.setenv("TASK", "evaluator")
    monkeypatch.setattr(__main__, "signal", fake := Mock(**{"signal.side_effect": SystemExit}))
    with pytest.raises(SystemExit):
        __main__.train(run)
    fake.signal.assert_called_once_with(fake.SIGTERM, fake.SIG_IGN)


@pytest.mark.parametrize("name", ["ckpt-20.index", "ckpt-20.data-00000-of-00001", "ckpt-20.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\0" * path.stat().st_size)])
def test_an_unreadable_checkpoint_is_skipped_and_read_once(run, monkeypatch, damage, name):
    save(run, 10, 20)
    damage(run.checkpoints / name)
    whole, read = [], Saved.damage
    monkeypatch.setattr(Saved, "damage", lambda saved, **how: (whole.append(saved.step), read(saved, **how))[1])
    evaluate(run, list, list, lambda: save(run, 30))
    assert [(10, 10.0), (30, 30.0)] == rows(run)
    assert whole.count(20) <= 1


def test_a_checkpoint_that_vanishes_while_it_is_read_is_ignored(run, monkeypatch, capsys):
    save(run, 10)
    read = saved_weights.load_evaluated

    def pruned(config: TrainConfig, model: keras.Model, prefix: str) -> None:
        Saved(run.checkpoints, 10).remove()
        read(config, model, prefix)

    monkeypatch.setattr(saved_weights, "load_evaluated", pruned)
    evaluate(run, lambda: save(run, 20))
    assert [(20, 20.0)] == rows(run)
    assert "warning" not in capsys.readouterr().out
