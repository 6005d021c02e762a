"""What a plan says of the stages of a model, and which models are refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import UsageError
from cluster.system.json_files import write_json
from train import patches
from train.config import Pipeline, TrainConfig, Transformer
from train.model.architectures import transformer_lm
from train.pipeline import model_blocks, stage_models
from train.pipeline.stage import StageGraph

SIZE = {"layers": 2, "width": 8, "heads": 2}
CONFIG = TrainConfig(model="transformer_lm", global_batch=8, micro_batches=4, transformer=Transformer(**SIZE))


@pytest.fixture(autouse=True, scope="module")
def _keras():
    patches.apply()


def new_model():
    return transformer_lm((6,), 11, **SIZE)


def config(**pipeline):
    return TrainConfig(**{**vars(CONFIG), "pipeline": Pipeline(**pipeline)})


def dense(name, units=4):
    return keras.layers.Dense(units, name=name)


def not_a_chain():
    inputs = keras.Input((4,), name="features")
    first = dense("first")(inputs)
    last = dense("last")(dense("middle")(first))
    return keras.Model(inputs, keras.layers.Concatenate(name="all")([first, last, inputs]))


def tied():
    embedding = keras.layers.Embedding(11, 8, name="embedding")
    inputs = keras.Input((6,), dtype="int32")
    hidden = dense("hidden", 8)(embedding(inputs))
    tie = keras.layers.Lambda(lambda values: values @ keras.ops.transpose(embedding.embeddings), name="tied")
    return keras.Model(inputs, dense("last", 11)(tie(hidden)))


def normalized(frozen=False):
    normalization = keras.layers.BatchNormalization(name="normalization", trainable=not frozen)
    nested = keras.Sequential([keras.Input((6,)), dense("inside", 6), normalization], name="nested")
    return keras.Sequential([keras.Input((6,)), nested, dense("last", 11)])


def joined():
    join, split = (keras.layers.Lambda(lambda x, size=size: keras.ops.reshape(x, (-1, size))) for size in (4, 8))
    return keras.Sequential([keras.Input((8,)), join, *map(dense, ("first", "second")), split, dense("last")])


class Moving(keras.layers.Dense):
    def call(self, inputs):
        self.bias.assign(0.9 * self.bias)
        return super().call(inputs)


class Scaled(keras.Model):
    def call(self, inputs, training=None):
        return super().call(inputs / 255, training=training)


def scaled():
    inputs = keras.Input((2,))
    return Scaled(inputs, keras.layers.Dense(1)(inputs))


def test_a_plan_says_what_each_stage_holds():
    gpipe, f1b = (
        stage_models.describe_partition(new_model(), config(schedule=name), 2)["stages"] for name in ("gpipe", "1f1b")
    )
    model = new_model()
    assert model.count_params() == sum(stage["parameters"] for stage in gpipe)
    layers = [layer.name for layer in model.layers if layer.name != "tokens"]
    assert layers == [name for stage in gpipe for name in stage["layers"]]
    assert 1 == pytest.approx(sum(stage["share"] for stage in gpipe))
    for stage in gpipe:  # weights, their gradients and the sums of these, and Adam's two moments
        assert 5 * 4 * stage["parameters"] == stage["state_bytes"]
    assert [4, 4] == [stage["in_flight"] for stage in gpipe]
    assert [2, 1] == [stage["in_flight"] for stage in f1b]
    assert [2 * stage["activation_bytes"] for stage in f1b[:1]] == [stage["activation_bytes"] for stage in gpipe[:1]]


def test_attention_counts_its_scores():
    def attention(tokens):
        blocks = model_blocks.split_model(transformer_lm((tokens,), 11, **SIZE))
        return model_blocks.estimate_cost(next(block for block in blocks if "layer_0_attention" in block.names), 2, 2)

    short, long = attention(64), attention(128)
    assert long.flops > 2 * short.flops
    assert long.activation_bytes > 2 * short.activation_bytes
    assert long.parameter_bytes == short.parameter_bytes


def test_memory_changes_the_cut_or_refuses_it():
    free = stage_models.describe_partition(new_model(), config(), 3)
    assert free["memory_bytes"] is None
    needed = max(stage["memory_bytes"] for stage in free["stages"])
    with pytest.raises(UsageError, match="--stages 3"):
        stage_models.describe_partition(new_model(), config(), 3, memory_bytes=needed // 4)


def test_the_tasks_take_the_recorded_cut_if_the_number_of_stages_is_the_same(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    write_json(run.stages, {"cut": ["layer_0_attention_norm"]})
    recorded, scaled = (stage_models.load_models(new_model(), config(), stages, run) for stages in (2, 3))
    assert ["tokens", "embedding"] == [layer.name for layer in recorded[0].model.layers]
    assert 3 == len(scaled)


@pytest.mark.parametrize(
    ("model", "options", "stages", "named"),
    [
        (new_model, {"cut": "layer_0_attention_add"}, 2, "'embedding' and 'layer_0_attention'"),
        (not_a_chain, {}, 2, "'first' and 'features'"),
        (tied, {"schedule": "pipedream", "cut": "hidden"}, 2, "'embedding/embeddings'"),
        (scaled, {}, 2, "Scaled overrides call"),
        (joined, {}, 3, "2 blocks"),
        (lambda: keras.Model(inputs := keras.Input((6,)), {"head": dense("last")(inputs)}), {}, 2, "not a dictionary"),
        (lambda: keras.Sequential([keras.Input((6,)), dense("first"), Moving(2, name="moving")]), {}, 2, "moving/bias"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, options, stages, named):
    with pytest.raises(UsageError) as refused:
        stage_models.partition_model(model(), config(**options), stages)
    assert named in str(refused.value)
    assert str(refused.value).isprintable()


def test_what_no_forward_changes_can_be_computed_again_and_in_several_pipelines():
    stage_models.partition_model(normalized(frozen=True), config(remat=True), 2)
    stage_models.partition_model(normalized(frozen=True), config(), 2, pipelines=2)
    with pytest.raises(UsageError):
        stage_models.partition_model(normalized(), config(), 2, pipelines=2)


def test_a_model_that_leaves_a_size_open_is_cut_for_the_size_of_its_data():
    inputs = keras.Input((None,), dtype="int32")
    hidden = dense("hidden", 8)(keras.layers.Embedding(11, 8)(inputs))
    model = keras.Model(inputs, dense("last", 11)(hidden))
    with pytest.raises(UsageError):
        stage_models.partition_model(model, config(), 2)
    _, stages = stage_models.partition_model(model_blocks.rebuild_with_shape(model, (6,)), config(), 2)
    assert [(None, 6, 8), (None, 6, 11)] == [stage.model.outputs[0].shape for stage in stages]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (keras.layers.Dense, [("shared", "first"), ("middle", "shared"), ("last",)]),
        (keras.layers.SpectralNormalization, [("shared", "first", "middle"), ("last",)]),
    ],
)
def test_only_a_layer_without_state_can_be_called_in_several_blocks(kind, expected):
    shared = kind(keras.layers.Dense(4), name="shared") if kind is not keras.layers.Dense else kind(4, name="shared")
    inputs = keras.Input((4,))
    middle = keras.layers.Dense(4, name="middle")(keras.layers.Dense(4, name="first")(shared(inputs)))
    outputs = keras.layers.Dense(2, name="last")(shared(middle))
    assert expected == [block.names for block in model_blocks.split_model(keras.Model(inputs, outputs))]


class Unchanged(keras.layers.Layer):
    """Returns its inputs, so that Keras keeps their mask only when the model is called."""

    def call(self, inputs):
        return inputs


@pytest.mark.parametrize("last", ["dense", "recurrent"])
def test_masks_cross_with_the_tensors_between_stages(last):
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    values = dense("hidden", 8)(Unchanged()(layers.Embedding(11, 8, mask_zero=True)(inputs)))
    values = Unchanged()(values)
    values = layers.GlobalAveragePooling1D()(dense("more", 8)(values)) if last == "dense" else layers.LSTM(8)(values)
    model = keras.Model(inputs, dense("last", 3)(values))
    tokens = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 0], [9, 0, 0, 0, 0, 0]], np.int32)
    blocks = model_blocks.split_model(model)
    assert len(blocks) >= 3
    outputs = tokens
    for number, block in enumerate(blocks):
        outputs = model_blocks.build_stage_model([block], number)(outputs)
    np.testing.assert_array_equal(model(tokens), outputs)
    assert not np.array_equal(model(tokens), model(np.where(tokens, tokens, 10)))


def test_what_the_last_stage_predicts_keeps_the_logits_of_probabilities():
    """For Keras's cross entropies, in evaluations."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2, "softmax")(inputs))
    held = SimpleNamespace(model=model, trained=[], drawn={})
    stages = SimpleNamespace(models=[held], stages=1, pipeline=0, pipelines=1, device=lambda _number: None)
    context: Any = SimpleNamespace(config=CONFIG, task_stages=stages)
    unused: Any = (None, 0, None, None, None)
    graph = StageGraph(context, *unused)
    kept, first = [], tf.constant(0, tf.int64)
    tf.function(lambda values: kept.append(hasattr(graph.predict(values, first), "_keras_logits")))(tf.ones([2, 4]))
    assert [True] == kept
