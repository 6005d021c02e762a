"""The state of callbacks in a checkpoint."""

import collections
import enum
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from train.callbacks.callback_actions import CallbackProgress, continuing_files, size_of_file
from train.callbacks.plain_values import decode_value, encode_attributes, encode_value, restore_attributes


def saved(callback: Any, made: dict[str, bytes]) -> dict[str, bytes]:
    """Return the state of a callback after a round trip through a checkpoint."""
    changed = {name: value for name, value in encode_attributes(callback)[0].items() if made[name] != value}
    return CallbackProgress(**decode_value(encode_value(vars(CallbackProgress(callbacks=[changed]))))).callbacks[0]


@pytest.mark.parametrize(
    "value",
    [
        {3: "three", (1, "a"): None, np.int64(7): 7.5},
        collections.OrderedDict(z=1, a=2),
        collections.Counter({2: 5, "x": 1}),
        collections.defaultdict(list, {4: [1, 2]}),
        collections.defaultdict(None, {4: 1}),
        collections.deque([(1, 2), 3], maxlen=2),
        {(1, 2), "x", None},
        frozenset([1.5]),
        b"\x00\xff",
        Path("some/file"),
        [float("inf"), -(10**30), True, "é"],
    ],
)
def test_containers_keep_their_types_keys_and_order(value):
    whole = decode_value(encode_value(value))
    assert (type(value), value) == (type(whole), whole)
    assert not isinstance(value, dict) or list(value) == list(whole)
    assert getattr(value, "maxlen", None) == getattr(whole, "maxlen", None)
    if isinstance(value, collections.defaultdict):
        assert value.default_factory is whole.default_factory


@pytest.mark.parametrize("array", [np.float32([[1, np.nan]]), np.array("2026-01-01", "M8[D]"), np.array(["a", "bc"])])
def test_arrays_keep_their_type_and_bits(array):
    whole = decode_value(encode_value([array]))[0]
    assert (array.dtype, array.shape, array.tobytes()) == (whole.dtype, whole.shape, whole.tobytes())


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(3), lambda generator: generator.gauss(0, 1)),
        (lambda: np.random.default_rng(3), lambda generator: generator.normal()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda generator: generator.integers(99)),
        (lambda: np.random.RandomState(3), lambda generator: generator.randn()),
    ],
)
def test_random_generators_continue_their_sequence(make, draw):
    generator, shared = make(), make()
    draw(generator)
    encoded = encode_value(generator)
    assert shared is decode_value(encoded, shared)
    drawn = [draw(each) for each in (generator, shared, decode_value(encoded))]
    assert [drawn[0]] * 3 == drawn


def test_loggers_of_several_tasks_continue_their_common_file_as_one(tmp_path):
    file = tmp_path / "log.csv"
    tasks, resumed = ([keras.callbacks.CSVLogger(file) for _ in range(2)] for _ in range(2))
    for logger in tasks:
        logger.on_train_begin()
    for logger in tasks:
        logger.on_epoch_end(0, {"loss": 2.0})
    size = size_of_file(tasks[0])
    for logger in tasks:
        logger.on_epoch_end(1, {"loss": 1.0})
    whole = file.read_bytes()
    for logger in resumed:
        with continuing_files([logger], [size]):
            logger.on_train_begin()
    for logger in resumed:
        logger.on_epoch_end(1, {"loss": 1.0})
    assert whole == file.read_bytes()


class Phase(enum.Enum):
    WARM, HOT = "warm", "hot"


class Window:
    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.lock = threading.Lock()

    def rate(self, epoch: int, rate: float) -> float:
        self.values[epoch] = rate
        return rate / (1 + len(self.values))


class Everything(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        total = [0.0]

        def add(value: float) -> float:
            total[0] += value
            return total[0]

        self.add, self.window, self.phase = add, Window(), Phase.WARM
        self.groups: Any = collections.defaultdict(lambda: [0])
        self.rates = self.window.rate
        self.mean, self.variable = keras.metrics.Mean(), tf.Variable(1.0)
        self.inner = keras.callbacks.EarlyStopping()
        self._private = 0
        self.file: Any = None

    def change(self) -> tuple[Any, ...]:
        """Change all attributes and return them."""
        self._private += 1
        self.phase = Phase.HOT
        self.groups[self._private][0] += 2
        self.inner.wait += 1
        self.mean.update_state(self._private)
        self.variable.assign_add(1.0)
        rates = self.rates(self._private, 1.0), self.window.rate(10 + self._private, 1.0)
        counted = self._private, self.phase, self.inner.wait, dict(self.groups)
        return self.add(1.5), rates, float(self.mean.result()), float(self.variable), counted


def test_objects_closures_variables_and_private_attributes_are_restored():
    first, undisturbed, resumed = Everything(), Everything(), Everything()
    made = encode_attributes(first)[0]
    assert first.change() == undisturbed.change()
    assert [] == restore_attributes([resumed], [saved(first, made)], [made])
    assert undisturbed.change() == resumed.change()


def test_an_attribute_that_was_reset_before_the_checkpoint_is_reset_again(tmp_path):
    """`on_train_begin` changes it in the new process, too, and opens a file there."""
    first, resumed = Everything(), Everything()
    made = encode_attributes(first)[0]
    resumed.groups[1][0] = 7
    resumed._private = 5
    with (tmp_path / "log").open("w") as resumed.file:
        assert [] == restore_attributes([resumed], [saved(first, made)], [made])
        assert (0, {}, False) == (resumed._private, dict(resumed.groups), resumed.file.closed)


class Shadow(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.shadow, self.held, self.layer = keras.models.clone_model(self.model), Window(), self.model.layers[0]
        self.held.model = self.shadow


def test_a_model_in_a_callback_keeps_its_weights_and_the_trained_one_those_of_the_checkpoint():
    trained = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trained.compile("sgd")
    callbacks = [Shadow(), Shadow()]
    for callback in callbacks:
        callback.set_model(trained)
        callback.on_train_begin()
    made = encode_attributes(callbacks[0])[0]
    callbacks[0].shadow.set_weights([np.ones((2, 1)), np.ones(1)])
    state = saved(callbacks[0], made)
    trained.set_weights([np.zeros((2, 1)), np.zeros(1)])
    assert ["shadow", "held"] == list(state)
    assert [] == restore_attributes(callbacks[1:], [state], [made])
    for model, sum_of_weights in ((callbacks[1].shadow, 3.0), (trained, 0.0)):
        assert sum_of_weights == sum(weight.sum() for weight in model.get_weights())


class Holds(keras.callbacks.Callback):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = self.other = held


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, lambda held: held.append(1)),
        (dict, lambda held: held.update({len(held): 1})),
        (collections.Counter, lambda held: held.update("aab")),
        (lambda: collections.defaultdict(list), lambda held: held[1].append(2)),
        (set, lambda held: held.add(len(held))),
        (lambda: collections.deque(maxlen=2), lambda held: held.append(1)),
    ],
)
def test_containers_that_callbacks_share_stay_shared_and_others_separate(make, change):
    before, after = ([Holds(shared) for _ in range(2)] for shared in (make(), make()))
    made = encode_attributes(before[0])[0]
    before[1].other = make()
    change(before[0].held)
    assert [] == restore_attributes(after, [saved(first, made) for first in before], [made, made])
    change(before[0].held)
    change(after[1].held)
    assert before[0].held == after[0].held == after[0].other
    assert make() == after[1].other


def test_attributes_that_cannot_be_saved_are_named(tmp_path):
    callback = Everything()
    assert {} == encode_attributes(callback)[1]
    with (tmp_path / "log").open("w") as callback.file:
        callback.groups = [Window()]  # which a new process would not have
        callback.window = type("History", (dict,), {})(epoch=1)  # whose contents are not attributes
        lost = {"file": "TextIOWrapper", "groups": "list", "window": "History"}
        assert lost == encode_attributes(callback)[1]


def test_an_attribute_of_another_type_is_not_restored():
    first, other = Everything(), Everything()
    made = encode_attributes(first)[0]
    first.window.values[1] = 1.0
    other.window = None  # type: ignore[assignment]
    assert ["Everything.window"] == restore_attributes([other], [saved(first, made)], [made])
    assert other.window is None
