"""oneDNN's primitives in users' models, and which models compute with them."""

import os
import tomllib

import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract import spec
from cluster.host.launch import configuration
from tests.support import own_module
from train.config import TrainConfig
from train.data.prepare import preparation
from train.startup import primitives

layers = keras.layers


def residual() -> keras.Model:
    """Return a block of a ResNet, with its 1x1 convolution with stride 2."""
    inputs = keras.Input((8, 8, 4))
    shortcut = layers.Conv2D(8, 1, strides=2)(inputs)
    return keras.Model(inputs, layers.add([shortcut, layers.Conv2D(8, 3, strides=2, padding="same")(inputs)]))


def in_a_loop() -> keras.Model:
    """Return a model whose convolution is in the function of a loop, where its shape is not known."""
    inputs = keras.Input((8, 8, 4))
    kernel = tf.zeros([3, 3, 4, 4])

    def body(images: tf.Tensor) -> list[tf.Tensor]:
        return [tf.nn.conv2d(images, kernel, 1, "SAME")]

    def repeat(images: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda _: True, body, [images], maximum_iterations=2)[0]

    return keras.Model(inputs, layers.Lambda(repeat, output_shape=(8, 8, 4))(inputs))


MODELS = {
    "convolutional": lambda: keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]
    ),
    "transposed": lambda: keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2DTranspose(4, 2, strides=2)]),
    "dilated": lambda: keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, dilation_rate=2)]),
    "separable": lambda: keras.Sequential([keras.Input((8, 8, 3)), layers.SeparableConv2D(4, 3)]),
    "recurrent": lambda: keras.Sequential([keras.Input((8, 3)), layers.GRU(4), layers.Dense(2, "softmax")]),
    "bfloat16": lambda: keras.Sequential([keras.Input((3,)), layers.Dense(4, dtype="mixed_bfloat16")]),
    "float16": lambda: keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, dtype="mixed_float16")]),
    "residual": residual,
    "in a loop": in_a_loop,
}
INSTRUCTIONS = ["avx2", "avx512"]


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(
    ("name", "unverified"),
    [
        *((name, []) for name in ("convolutional", "transposed", "dilated", "separable", "recurrent")),
        ("bfloat16", ["MatMul in bfloat16"]),
        ("float16", ["Conv2D in float16"]),  # it aborts the process
        ("residual", ["Conv2D 1x1 strided"]),  # it corrupts memory
        ("in a loop", ["Conv2D of unknown shape"]),
    ],
)
def test_only_models_of_measured_operations_may_use_onednn(name, unverified, instructions):
    model = MODELS[name]()
    shape = tf.TensorSpec([2, *model.input_shape[1:]], tf.float32)
    graph = tf.function(lambda inputs: model(inputs, training=True)).get_concrete_function(shape).graph
    assert unverified == primitives.find_unverified([graph])[instructions]


def test_every_operation_that_tensorflow_replaces_is_known():
    """A release of TensorFlow that replaces more must be measured again."""
    from tensorflow.python.framework import kernels

    names = {kernel.op for kernel in kernels.get_all_registered_kernels().kernel}
    replaced = {name.removeprefix("_Mkl").removeprefix("Native") for name in names if name.startswith("_Mkl")}
    ours = {
        name
        for name in replaced - primitives.OPERATIONS
        if not name.startswith(("Quantized", "Fused", "PadWith")) and not name.endswith("WithBias")
    }
    # Patterns of elementwise operations, each measured as such.
    assert {"LayerNorm", "Swish"} == ours


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_table_lists_no_operation_twice(instructions):
    table = tomllib.loads(primitives.TABLE.read_text())[instructions]
    assert set(table["repeat"]).isdisjoint(table["vary"])


PARTS = """
import os
import numpy as np
from tensorflow import keras
import {helper}

def data():
    split = np.ones((4, 8, 8, 3), "float32"), np.array([0, 1, 0, 1])
    return {{"train": split, "test": split}}

def model(shape, outputs):
    print("built", os.environ.get("WIDTH"), os.getenv("HOME"))
    return keras.Sequential(
        [keras.Input(shape), keras.layers.Conv2D(4, {helper}.KERNEL, strides=2), keras.layers.Flatten(),
         keras.layers.Dense(outputs)]
    )
"""


def test_a_model_is_tried_again_only_when_something_has_changed(tmp_path, monkeypatch, capfd):
    """What it prints is printed each time, to stderr; a change of a module that it imports counts, too."""
    own_module.write(monkeypatch, tmp_path, "own_kernel", "KERNEL = 1\n")
    own_module.write(monkeypatch, tmp_path, "own_once", PARTS.format(helper="own_kernel"))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    preparation.prepare_dataset("own_once:data", tmp_path / "data")
    config = TrainConfig(dataset="own_once:data", model="own_once:model", global_batch=4).to_json()

    def check() -> tuple[list[str], bool]:
        capfd.readouterr()
        found = configuration.check_config(config, spec.build(workers=0), os.environ | {"PYTHONPATH": str(tmp_path)})
        shown = capfd.readouterr()
        assert ("", ["WIDTH"]) == (shown.out, found["missing"])
        return found["unverified"]["avx2"], "built" in shown.err

    assert (["Conv2D 1x1 strided"], True) == check()
    again = {"missing": ["WIDTH"], "unverified": {"avx2": ["tried again"]}}
    monkeypatch.setattr(configuration.user_code, "run", lambda *_, **__: dict(again))
    assert (["Conv2D 1x1 strided"], True) == check()
    (tmp_path / "own_kernel.py").write_text("KERNEL = 3\n")
    assert (["tried again"], False) == check()
