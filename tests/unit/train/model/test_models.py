"""Models, losses, metrics and optimizers of the user's own: built, or refused where training could not use them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from keras.src.optimizers.multi_optimizer import OptimizerMap
from keras.src.random.seed_generator import global_seed_generator
from tensorflow import keras

from cluster.system.errors import UsageError
from tests.support import own_module, small_training
from train import patches, program
from train.config import TrainConfig, Transformer
from train.loops import compiling, train_step
from train.loops.evaluation import new_evaluation
from train.model import input_types, masks, models, objectives, optimizers
from train.model.architectures import transformer_lm
from train.saving import saved_weights
from train.saving.checkpoint import CheckpointManager
from train.settings.parts import Optimizer
from train.strategy import precision_policy

SHAPE, OUTPUTS = (4, 5), 3


class Subclass(keras.Model):
    """Makes its variables in its layers, when it is called: `build` would make none."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(outputs)

    def call(self, features: Any, training: bool = False) -> Any:
        return self.dense(self.flatten(features))


@pytest.fixture
def build(monkeypatch) -> Callable[[Callable[..., Any]], keras.Model]:
    def make(function: Callable[..., Any]) -> keras.Model:
        own_module.put(monkeypatch, "own_models", model=function)
        return models.build_by_name("own_models:model", SHAPE, OUTPUTS)

    return make


def flat(outputs: int) -> keras.Model:
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(outputs)])


@pytest.mark.parametrize("kind", [flat, Subclass])
def test_a_model_that_was_not_built_gets_its_variables(kind, build):
    model = build(lambda shape, outputs: kind(outputs))
    assert [(20, 3), (3,)] == [tuple(variable.shape) for variable in model.trainable_variables]
    weights = model.get_weights()
    outputs_BK = model(np.ones((2, *SHAPE), np.float32))
    np.testing.assert_allclose(outputs_BK, np.ones((2, 20)) @ weights[0] + weights[1], rtol=1e-5)


@pytest.mark.parametrize("kind", [keras.layers.Dense, tf_keras.layers.Dense, tf_keras.Sequential])
def test_a_result_that_is_not_a_model_of_keras_3_is_refused(build, kind):
    with pytest.raises(UsageError, match=f"returned {kind.__module__}.*expected a keras model; use `from tensorflow"):
        build(lambda shape, outputs: kind() if kind is tf_keras.Sequential else kind(outputs))


class Generative(keras.Model):
    """Its `compile` is called in another way."""

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(d_optimizer)


def test_a_compile_that_fit_cannot_call_is_refused(monkeypatch):
    def own(shape: tuple[int, ...], outputs: int) -> keras.Model:
        inputs = keras.Input(shape)
        return Generative(inputs, keras.layers.Dense(outputs)(inputs))

    own_module.put(monkeypatch, "own_models", model=own)
    with pytest.raises(UsageError, match="Generative"):
        models.build_configured(TrainConfig(model="own_models:model", loop="fit"), SHAPE, OUTPUTS)
    assert isinstance(models.build_configured(TrainConfig(model="own_models:model"), SHAPE, OUTPUTS), Generative)


def test_a_model_that_is_built_again_to_be_exported_freezes_the_same_layers(monkeypatch):
    """Keras counts layers without a name over the whole process."""
    _, _, number = keras.layers.Dense(1).name.partition("_")
    name = f"dense_{int(number or 0) + 2}"  # of the second layer after this one
    own_module.put(monkeypatch, "own_models", model=lambda _shape, outputs: keras.Sequential([flat(4), flat(outputs)]))
    config = TrainConfig(model="own_models:model", freeze=name)
    for _ in range(3):
        model = models.build_configured(config, SHAPE, OUTPUTS)
        assert [20 * 4 + 4, 4 * OUTPUTS + OUTPUTS] == [layer.count_params() for layer in model.layers]
        assert [True, False] == [bool(layer.trainable_weights) for layer in model.layers]
    assert keras.layers.Dense(1).name not in [layer.name for layer in model._flatten_layers()]


@pytest.mark.parametrize("draw", [np.random.permutation, lambda size: keras.random.shuffle(np.arange(size))])
def test_constants_that_are_drawn_with_a_model_are_the_same_in_each_build(monkeypatch, draw):
    def permuting(shape: tuple[int, ...], outputs: int) -> keras.Model:
        inputs, order = keras.Input(shape), draw(shape[-1])
        permuted = keras.layers.Lambda(lambda values: tf.gather(values, order, axis=-1))(inputs)
        return keras.Model(inputs, keras.layers.Dense(outputs)(keras.layers.Flatten()(permuted)))

    own_module.put(monkeypatch, "own_models", model=permuting)
    features = np.random.default_rng(0).normal(size=(2, 4, 50))
    keras.utils.set_random_seed(0)  # the process has no global generator
    built = [models.build_configured(TrainConfig(model="own_models:model"), (4, 50), OUTPUTS) for _ in range(2)]
    np.testing.assert_array_equal(*(model(features) for model in built))


class Sampling(keras.layers.Layer):
    """Draws when it is called, also at inference."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(tf.shape(inputs))


@pytest.mark.slow
def test_what_a_layer_draws_at_inference_is_the_same_in_each_evaluation(tmp_path):
    source, model = small_training.prepare(tmp_path), keras.Sequential([keras.layers.Flatten(), Sampling()])
    loss = objectives.Averaged(lambda _labels, outputs: outputs)
    patches.apply()
    measure = new_evaluation(None, model, objectives.Objective(loss, loss, "mean"), source, 500)
    state = global_seed_generator().state.numpy()
    first, second = measure(), measure()
    assert first["eval_loss"] == second["eval_loss"]
    np.testing.assert_array_equal(state, global_seed_generator().state.numpy())  # steps draw from it, too


@pytest.mark.slow
def test_an_evaluation_of_tf_keras_includes_the_regularizers_of_weights_alone(tmp_path):
    source, layer = small_training.prepare(tmp_path), tf_keras.layers.Dense(1, None, True, "ones", "ones", "l2")
    layer.activity_regularizer = tf_keras.regularizers.L2(0.5)
    model = tf_keras.Sequential([tf_keras.layers.Flatten(), layer])
    loss = objectives.Averaged(lambda _labels, outputs: 0 * outputs)
    results = new_evaluation(None, model, objectives.Objective(loss, loss, "mean"), source, 500)()
    assert pytest.approx(0.01 * layer.kernel.shape[0]) == results["eval_loss"]


@pytest.mark.slow
def test_no_output_of_a_transformer_depends_on_a_later_token():
    model = transformer_lm((6,), 11, layers=2, width=8, heads=2)
    tokens = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
    changed = tokens.copy()
    changed[0, 4] = 9
    one, other = model(tokens).numpy(), model(changed).numpy()
    assert one[:, :4].tobytes() == other[:, :4].tobytes()
    assert not np.array_equal(one[:, 4:], other[:, 4:])


@pytest.mark.slow
def test_options_set_the_size_of_a_transformer():
    config = TrainConfig(model="transformer_lm", transformer=Transformer(layers=3, width=16, heads=2))
    model = models.build_configured(config, (8,), 256)
    attention, feed_forward, norms = 4 * 16 * 16 + 4 * 16, 2 * 64 * 16 + 64 + 16, 2 * 2 * 16
    embedding, logits = 256 * 16 + 8 * 16, 256 * 16 + 256 + 2 * 16
    assert 3 * (attention + feed_forward + norms) + embedding + logits == model.count_params()
    assert ("int32", (None, 8, 256)) == (input_types.input_dtypes(model, ()), model.output_shape)


def test_a_model_with_one_input_takes_features_by_its_name():
    tokens = keras.Input((3,), name="tokens", dtype="int32")
    model = keras.Model(tokens, keras.layers.Embedding(5, 2)(tokens))
    assert input_types.input_dtypes(model, {"tokens": ()}) == {"tokens": "int32"}


def test_examples_of_a_transformer_must_be_sequences():
    with pytest.raises(UsageError):
        transformer_lm((28, 28, 1), 10)


# Losses, metrics and optimizers. Numbers of the built-in ones: `tests/differential`


def _branching(labels_B: tf.Tensor, outputs_BK: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(outputs_BK) > 0:
        return outputs_BK[:, 0]
    return -outputs_BK[:, 0]


@pytest.mark.parametrize("classifies", [True, False])
def test_a_users_loss_keeps_the_score_of_the_data(classifies, monkeypatch):
    """It may branch on tensors, also where what calls it is not converted by autograph: as in our steps."""
    own_module.put(monkeypatch, "own_losses", branching=_branching)
    objective = objectives.build_by_name("own_losses:branching", classifies=classifies)
    called = tf.function(objective.loss, autograph=False)
    assert [[2.0, 3.0], [2.0, 3.0]] == [
        called(tf.zeros([2]), tf.constant([[2.0], [3.0]]) * s).numpy().tolist() for s in (1.0, -1.0)
    ]
    assert ("accuracy" if classifies else "absolute_error") == objective.score_name


@pytest.mark.parametrize("sigmoid", [keras.activations.sigmoid, tf.nn.sigmoid])
@pytest.mark.parametrize(
    "function_of",
    [lambda one: one.loss, lambda one: one.metrics["entropy"], lambda one: compiling._Loss(one.loss)],
)
def test_a_cross_entropy_of_keras_takes_the_logits_of_probabilities_and_their_mask(monkeypatch, sigmoid, function_of):
    """Probabilities that are 1 in float32 have no other gradient. By our steps, an evaluation and `fit`."""
    own_module.put(monkeypatch, "own_metrics", made=lambda: {"entropy": keras.losses.binary_crossentropy})
    config = TrainConfig(loss="keras.losses:binary_crossentropy", metrics="own_metrics:made")
    objective = objectives.build_configured(config, classifies=False, shapes=lambda: ((1,), (1,)))

    def step(logits: tf.Tensor) -> tf.Tensor:
        outputs = sigmoid(logits)
        outputs._keras_mask = mask = tf.constant([True, False])
        losses = function_of(objective)(tf.zeros([2, 1]), outputs)
        assert masks.mask_of(outputs) is mask
        return tf.reduce_mean(losses)

    assert 100.0 == float(tf.function(step, autograph=False)(tf.constant([[100.0], [50.0]])))


@pytest.mark.parametrize("kept", [[[True, True], [True, True]], [[True, True], [False, True]]])
def test_a_class_that_a_loss_of_keras_ignores_does_not_count(monkeypatch, kept):
    def loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True, ignore_class=9)

    own_module.put(monkeypatch, "own_losses", loss=loss)
    labels, outputs = tf.constant([[0, 1], [2, 9]]), tf.random.stateless_normal([2, 2, 3], [1, 2])
    outputs._keras_mask = tf.constant(kept)
    objective = objectives.build_by_name("own_losses:loss", classifies=True)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=9)(labels, outputs)
    np.testing.assert_allclose(tf.reduce_mean(objective.loss(labels, outputs)), expected, rtol=1e-6)


def test_a_loss_of_classes_refuses_other_labels():
    with pytest.raises(UsageError, match="--loss sparse_categorical_crossentropy"):
        objectives.build_by_name("sparse_categorical_crossentropy", classifies=False)


@pytest.mark.parametrize(
    ("loss", "labels", "outputs"),
    [
        ("sparse_categorical_crossentropy", (), (6,)),
        ("sparse_categorical_crossentropy", (3,), (4, 5)),
        ("sparse_categorical_crossentropy", (), None),
        ("mean_squared_error", (5,), (1,)),
        ("mean_squared_error", (), ()),
    ],
)
def test_outputs_that_a_built_in_loss_cannot_compare_are_refused(loss, labels, outputs):
    with pytest.raises(UsageError, match="^--model"):
        objectives.check_outputs(TrainConfig(loss=loss), 5, (labels, outputs))


@pytest.mark.parametrize("outputs", [(64,), (1,), (), None, {"mean": (2,), "spread": (2,)}])
def test_a_users_loss_takes_any_outputs(outputs, monkeypatch):
    """Where they cannot be compared with the labels, the score is the loss alone."""
    own_module.put(monkeypatch, "own_losses", any=lambda labels, outputs: tf.cast(labels, tf.float32))
    config = TrainConfig(loss="own_losses:any", loop="custom")
    objectives.check_outputs(config, 5, ((), outputs))
    objective = objectives.build_configured(config, classifies=True, shapes=lambda: ((), outputs))
    names = {(1,): "absolute_error", (64,): "accuracy"}
    assert objective.score_name == (names.get(outputs, "data_loss") if isinstance(outputs, tuple) else "data_loss")
    assert [2.0, 3.0] == objective.loss(tf.constant([2, 3]), None).numpy().tolist()


@pytest.mark.parametrize("made", [None, {}, {"Upper": abs}, {"twos": 2}, {"accuracy": abs}])
def test_invalid_metrics_are_refused(monkeypatch, made):
    own_module.put(monkeypatch, "own_metrics", made=lambda: made)
    with pytest.raises(UsageError, match="^--metrics 'own_metrics:made'"):
        objectives.build_configured(TrainConfig(metrics="own_metrics:made"), classifies=True)


def test_the_mask_of_a_nested_model_is_expected_where_its_symbolic_output_has_none():
    layers = keras.layers
    inner = keras.Sequential([keras.Input((3, 4)), layers.Dense(4)])
    model = keras.Sequential([keras.Input((3,)), layers.Embedding(5, 4, mask_zero=True), inner, layers.Dense(2)])
    assert masks.mask_of(model(tf.ones([1, 3]))) is not None
    assert masks.may_begin_in(model)
    assert not masks.may_begin_in(inner)


def test_an_example_of_padding_alone_counts_nothing():
    values = tf.constant([[1.0, 2.0], [8.0, np.nan], [np.inf, 3.0]])
    mask = tf.constant([[True, True], [True, False], [False, False]])
    np.testing.assert_allclose(masks.average_by_example(values, mask), [3.0, 8.0, 0.0])  # 3 positions of 3 examples
    np.testing.assert_allclose(masks.average_by_example(values[:1], mask[2:]), [0.0])


PEAK = 0.1


def configured(**settings: Any) -> TrainConfig:
    return TrainConfig(optimizer=Optimizer(**{"learning_rate": PEAK, "warmup_steps": 2} | settings)).check()


def new_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])


def test_the_step_size_follows_its_schedule_to_a_part_of_it_in_fewer_steps() -> None:
    """That of all steps, to 0: `tests/differential`."""
    config = configured(schedule="linear", decay_steps=4, end_share=0.5)
    schedule = optimizers.RateSchedule(config, total_steps=10)
    expected = [0.5, 0.75, 1, 0.875, 0.75, 0.625, *[0.5] * 5]
    np.testing.assert_allclose([float(schedule(step)) / PEAK for step in range(11)], expected, rtol=1e-6)


class Ids(keras.Model):
    """Declares no types; returns what an Embedding would look up."""

    def call(self, inputs: Any) -> Any:
        return tf.cast(inputs, tf.int32)


@pytest.mark.parametrize(("precision", "largest"), [("fp32", 2**24), ("bf16", 2**8), ("fp16", 2**11)])
def test_ids_that_a_model_without_declared_types_would_round_are_refused(precision: str, largest: int) -> None:
    with precision_policy(precision):
        model = Ids()
    for dtype in (tf.int32, tf.int64):
        ids = tf.constant([[0, 7, largest]], dtype)
        np.testing.assert_array_equal(ids, model(train_step.cast_features(model, ids)))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        train_step.cast_features(model, tf.constant([largest + 1], tf.int64))
    refused = program.explain(error.value)
    assert isinstance(refused, UsageError)
    assert f"as {model.compute_dtype}, " in str(refused)
    problem = "Detected at node SparseSoftmaxCrossEntropyWithLogits/GatherV2\nindices[5] = 10 is not in [0, 10)"
    assert "--num-outputs" in str(program.explain(tf.errors.InvalidArgumentError(None, None, problem)))


def test_a_weight_decay_of_0_turns_it_off() -> None:
    for name in ("adam", "adamw"):
        assert not optimizers.build_optimizer(configured(name=name, weight_decay=0.0)).weight_decay


def test_a_pattern_that_names_no_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="--optimizer.no-decay 'gamma'"):
        optimizers.build_for_model(configured(weight_decay=0.1, no_decay="gamma"), new_model())


@pytest.mark.parametrize("evaluate", [True, False])
def test_evaluation_uses_the_averages_if_requested(tmp_path: Path, evaluate: bool) -> None:
    config, model = configured(ema=0.5, ema_evaluate=evaluate), new_model()
    optimizer, kept = optimizers.build_for_model(config, model, total_steps=8), list[Any]()
    first = model.trainable_variables[0]
    for step in range(2):
        optimizer.apply([tf.sin(step + one.value) for one in model.trainable_variables], model.trainable_variables)
        kept.append(first.numpy())  # the first weights are the first averages
    saves = CheckpointManager(model, optimizer, tf.Variable(2, dtype=tf.int64), tmp_path, keep=1, writes=True)
    saves.save(2)
    saves.wait()
    expected = sum(kept) / 2 if evaluate else kept[1]
    model.layers[-1].trainable = False  # as a callback may do
    with optimizers.with_averages(config, model, optimizer):
        np.testing.assert_allclose(first, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept[1], first)
    restored = new_model()
    saved_weights.load_evaluated(config, restored, str(tmp_path / "ckpt-2"))
    np.testing.assert_allclose(restored.trainable_variables[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["nothing", "scaled", "several"])
def test_a_function_that_returns_no_optimizer_or_one_that_unscales_gradients_is_refused(monkeypatch, name):
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    several = keras.optimizers.MultiOptimizer(OptimizerMap(keras.optimizers.SGD()))
    made = {"nothing": lambda rate: rate, "scaled": lambda _rate: scaled, "several": lambda _rate: several}
    own_module.put(monkeypatch, "own_optimizers", **made)
    with pytest.raises(UsageError, match=f"--optimizer.name 'own_optimizers:{name}' returned"):
        optimizers.build_optimizer(configured(name=f"own_optimizers:{name}"))


def test_a_rate_that_cannot_be_computed_of_the_given_schedule_is_refused(monkeypatch):
    own_module.put(monkeypatch, "own_optimizers", half=lambda rate: keras.optimizers.SGD(lambda: rate / 2))
    with pytest.raises(UsageError, match="the rate of --optimizer.name 'own_optimizers:half': .*RateSchedule"):
        optimizers.build_optimizer(configured(name="own_optimizers:half"))


def test_an_optimizer_does_not_divide_by_a_scale_that_no_loss_has(monkeypatch):
    own_module.put(
        monkeypatch, "own_optimizers", scaling=lambda _rate: keras.optimizers.SGD(0.5, loss_scale_factor=8.0)
    )
    optimizer, variable = optimizers.build_optimizer(configured(name="own_optimizers:scaling")), keras.Variable([1.0])
    optimizer.apply([tf.constant([1.0])], [variable])
    np.testing.assert_allclose(variable.numpy(), [0.5])
