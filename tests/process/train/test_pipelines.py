"""A pipeline of one process must end with the weights and results of one device."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cluster.system.json_files import read_json, write_json
from tests.support import own_module
from train import program, strategy
from train.config import Optimizer, TrainConfig
from train.data.prepare import preparation
from train.patches import placed_seeds
from train.pipeline.pipeline_steps import PipelineSteps

DEVICES = 3


class Noisy(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:  # draws also at inference, from a generator that all layers share
        return inputs + keras.random.normal(keras.ops.shape(inputs), dtype=inputs.dtype)


class Freezing(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.layers[0].trainable = False


def plain(shape: Any, _outputs: Any, dtype: str = "float32", outputs: int = 2) -> keras.Model:
    layers = [part for _ in range(3) for part in (keras.layers.Dense(8, "tanh", dtype=dtype), Noisy(dtype=dtype))]
    return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(outputs, dtype=dtype)])


@pytest.fixture
def new_program(tmp_path, make_run, monkeypatch) -> Any:
    """Makes the program of a run in some stages, 0 for one device."""
    split = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32), np.arange(32) % 2
    own = own_module.put(monkeypatch, "own", plain=plain, data=lambda: {"train": split, "test": split})
    own.half, own.single = functools.partial(plain, dtype="bfloat16"), functools.partial(plain, outputs=1)
    own.callbacks = lambda _run, _task: [Freezing()]
    own.squared = lambda labels, outputs: tf.square(tf.cast(labels, tf.float32) - outputs[:, 0])
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.setattr(program, "configure_threads", lambda config: None)  # threads and devices are fixed by now
    monkeypatch.setattr(strategy, "configure_devices", lambda devices: [f"CPU:{index}" for index in range(devices)])
    preparation.prepare_dataset("own:data", tmp_path)

    def make(stages: int, model: str = "own:plain", **more: Any) -> program.Program:
        topology = {"strategy": "pipeline" if stages else "one", "devices": stages or 1}
        run, sizes = make_run(f"stages-{stages}", workers=0, **topology), {"global_batch": 8, "micro_batches": 4}
        parts = {"dataset": "own:data", "model": model, "optimizer": Optimizer("sgd", 0.5, warmup_steps=0)}
        write_json(run.config, TrainConfig(**parts, **sizes, max_steps=3, **more).to_json())
        return program.Program(run, run.load_cluster().task("chief"))

    return make


@pytest.mark.parametrize(
    "options", [{"model": "own:half"}, {"callbacks": "own:callbacks"}, {"model": "own:single", "loss": "own:squared"}]
)
def test_weights_and_results_must_be_those_of_one_device(new_program, options):
    programs = [new_program(stages, **options) for stages in (0, 2)]
    for each in programs:
        each.main()
    one, pipeline = (read_json(each.run.control / "result.json") | {"examples_per_s": 0} for each in programs)
    assert one == pipeline


def test_stages_must_draw_at_inference_as_one_device_and_add_up_losses_in_their_order(new_program):
    context, batch = new_program(3)._task_context(), tf.constant(3, tf.int64)
    steps, outputs = PipelineSteps(context, context.new_policy()), tf.ones([2, 4])
    for stage in steps._stages.values():
        outputs = stage.predict(outputs, batch)
    with placed_seeds.random_place(tf.zeros_like(batch), batch):
        np.testing.assert_allclose(context.model(tf.ones([2, 4]), training=False), outputs, rtol=1e-5)
    graph = steps._loop.get_concrete_function(batch, batch).graph
    nodes = [node for function in graph.as_graph_def().library.function for node in function.node_def]
    assert 3 not in [node.attr["N"].i for node in nodes if node.op == "AddN"]  # whose order depends on timing
