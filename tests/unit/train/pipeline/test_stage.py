"""The stages of one process compute the gradients of one device, bit for bit, whatever the cut and the schedule."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from train import patches
from train.loops.train_step import never_inlined
from train.model.architectures import transformer_lm
from train.patches import placed_seeds
from train.pipeline import cut as cutting
from train.pipeline import model_blocks, schedule
from train.pipeline.edges import LocalEdges
from train.pipeline.partition import Plan, partition
from train.pipeline.stage import Stage, add

BATCH, CONTEXT, VOCABULARY, MICRO_BATCHES = 8, 6, 11, 4
MICRO = BATCH // MICRO_BATCHES


@pytest.fixture(autouse=True, scope="module")
def exact():
    patches.apply()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def new_model():
    keras.utils.set_random_seed(3)
    return transformer_lm((CONTEXT,), VOCABULARY, layers=2, width=8, heads=2)


def new_cnn():
    keras.utils.set_random_seed(3)
    make = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            make.Conv2D(4, 3, activation="relu"),
            make.MaxPooling2D(),
            make.Dropout(0.5),
            make.Flatten(),
            make.Dense(16, activation="relu"),
            make.Dropout(0.3),
            make.Dense(VOCABULARY),
        ]
    )


def data():
    random = np.random.default_rng(0)
    return [random.normal(size=(BATCH, 8, 8, 1)).astype(np.float32), random.integers(0, VOCABULARY, BATCH)]


class Task:
    """A model, its data of one step, and its loss."""

    def __init__(self, model):
        self.model = model
        self.features, self.labels = [tf.constant(part) for part in data()]

    def batch(self, _step, at):
        return self.features[at * MICRO : (at + 1) * MICRO]

    def loss(self, outputs, _step, at):
        labels = self.labels[at * MICRO : (at + 1) * MICRO]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        return tf.stack([tf.reduce_sum(losses) / BATCH, 0.0])


def of_one_device(task, step=0):
    """Return the loss and the gradients of one device that takes the same micro-batches in order."""
    variables = [variable.value for variable in task.model.trainable_variables]

    @never_inlined
    def forward(features, step, at):
        with placed_seeds.random_place(step, tf.zeros_like(at), at):
            return task.loss(task.model(features, training=True), step, at)

    @tf.function(autograph=False)
    def run(step):
        sums, results = None, []
        for at in range(MICRO_BATCHES):
            number = tf.constant(at, tf.int64)
            with tf.GradientTape() as tape:
                results.append(forward(task.batch(step, number), step, number))
            found = tape.gradient(results[-1], variables, output_gradients=tf.constant([1.0, 0.0]))
            found = [tf.convert_to_tensor(each) for each in found]
            sums = add([tf.zeros_like(each) for each in found] if sums is None else sums, found)
        return tf.add_n(results), sums

    return run(tf.constant(step, tf.int64))


def of_stages(task, number, name, remat=False, step=0):
    """Return the same from all stages of a schedule within this process, whose updates record their gradients."""
    blocks = model_blocks.split(task.model)
    found = partition(model_blocks.estimate(blocks, MICRO, 2), Plan(number))
    parts = cutting.build_parts(task.model, [blocks[each.first : each.last] for each in found], MICRO)
    shared = {"edges": LocalEdges(), "features": task.batch, "loss": task.loss, "remat": remat}
    gradients = {}

    def record(at):
        return lambda sums, _micro_batch: gradients.update({at: sums}) or tf.zeros([])

    stages = [Stage(part, at, number, MICRO, update=record(at), **shared) for at, part in enumerate(parts)]

    @tf.function(autograph=False)
    def run(step):
        for stage in stages:
            stage.begin(step)
        for at, instruction in schedule.interleave(schedule.build(name, number, MICRO_BATCHES)):
            stages[at].execute(instruction)
        return tf.add_n([stage.end() for stage in stages]), [one for at in sorted(gradients) for one in gradients[at]]

    return run(tf.constant(step, tf.int64))


def assert_same_bits(one, other):
    assert one[0].numpy().tobytes() == other[0].numpy().tobytes()
    assert len(one[1]) == len(other[1])
    for expected, actual in zip(one[1], other[1], strict=True):
        assert expected.numpy().tobytes() == actual.numpy().tobytes()


@pytest.mark.slow
def test_stages_compute_the_gradients_of_one_device_and_random_layers_drop_by_step_and_micro_batch():
    """Also where the forward pass is computed again."""
    task = Task(new_cnn())
    expected = of_one_device(task, 1)
    assert of_one_device(task, 0)[0].numpy()[0] != expected[0].numpy()[0]
    assert_same_bits(expected, of_stages(task, 2, "gpipe", step=1))
    assert_same_bits(expected, of_stages(task, 3, "1f1b", remat=True, step=1))


def test_stage_models_have_the_variables_of_the_model_in_order():
    model = new_model()
    chain = model_blocks.split(model)
    assert len(chain) == 7
    stages = [model_blocks.stage_model(part, at) for at, part in enumerate((chain[:2], chain[2:5], chain[5:]))]
    own = [id(variable) for stage in stages for variable in stage.trainable_variables]
    assert own == [id(variable) for variable in model.trainable_variables]


def test_a_residual_block_is_never_cut():
    names = [block.names for block in model_blocks.split(new_model())]
    assert ("layer_0_attention_norm", "layer_0_attention", "layer_0_attention_add") in names


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
    assert expected == [block.names for block in model_blocks.split(keras.Model(inputs, outputs))]
