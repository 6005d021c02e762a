"""Trainings with callbacks."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.heartbeat import HeartbeatWriter
from tests.support import own_module
from tests.support.callback_training import CONFIG, EXAMPLES, Killed, Recorder, Trained
from train.context import TaskContext
from train.data import opening
from train.data.prepare.preparation import write_arrays
from train.loops import custom, fit
from train.model import objectives


@pytest.fixture
def own_parts(monkeypatch) -> Any:
    """The user's module. The loss is the output itself: the bias goes down by the learning rate at every step."""
    values = {"loss": lambda labels, outputs: outputs[:, 0], "stop": threading.Event()}
    return own_module.put(monkeypatch, "own_parts", **values)


@pytest.fixture
def train(own_parts, make_run, tmp_path) -> Callable[..., Trained]:
    """Trains, or trains on, for some steps with callbacks of the user's own after a recording one."""
    run, data_dir = make_run(workers=0), tmp_path / "data"
    features = np.random.default_rng(0).normal(size=(EXAMPLES, 2)).astype(np.float32)
    splits = {"train": (features, features[:, 0]), "test": (features[:7], features[:7, 0])}
    write_arrays(data_dir, CONFIG.dataset, "1", splits)

    def do(
        steps: int,
        *others: keras.callbacks.Callback,
        callbacks: str = CONFIG.callbacks,
        model: type[keras.Model] = keras.Model,
        **values: Any,
    ) -> Trained:
        recorder = Recorder()
        own_parts.callbacks = lambda run, task: [recorder, *others]
        config = dataclasses.replace(CONFIG, max_steps=steps, callbacks=callbacks, **values)
        source = opening.open_source(config, data_dir)
        strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
        keras.utils.set_random_seed(1)

        def new_model() -> keras.Model:
            features = keras.Input((2,))
            return model(features, keras.layers.Dense(1)(features))

        with strategy.scope():
            trained = new_model()
        spec = run.load_cluster()
        context = TaskContext(
            run=run,
            task=spec.task("chief"),
            spec=spec,
            config=config,
            source=source,
            objective=dataclasses.replace(
                objectives.build_by_name(config.loss, classifies=source.classifies),
                metrics={"retrieval_at_1": lambda labels, outputs: outputs[:, 0]},
            ),
            strategy=strategy,
            gang=strategy,
            model=trained,
            new_model=new_model,
            heartbeat=HeartbeatWriter(run, spec.task("chief"), 0),
            stop=own_parts.stop,
        )
        try:
            if config.loop == "fit":
                fit.train(context)
            else:
                custom.train(custom.prepare(context))
        except Killed:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()  # a process that is killed writes nothing more
            raise
        return Trained(run, recorder)

    return do
