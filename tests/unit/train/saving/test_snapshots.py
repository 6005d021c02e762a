"""Snapshots in memory: exact, never torn, the same in all tasks, and no more often than they may cost."""

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from cluster.contract.recovery import snapshot_files
from cluster.system import memory
from train.loops import actions
from train.loops.actions import KeepSnapshot
from train.loops.loop import CallProgress
from train.loops.steps import LoopResult, Signals
from train.saving import snapshots
from train.saving.snapshots import NONE, MemorySnapshots

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")


@pytest.fixture
def files() -> Any:
    """Makes the files of a task; they are closed at the end."""
    made: list[int] = []

    def new() -> tuple[int, ...]:
        made.extend(pair := snapshot_files.descriptors({snapshot_files.VARIABLE: snapshot_files.create()}))
        return pair

    yield new
    for file in made:
        os.close(file)


def state(seed: int, values: int = 0) -> dict[str, tf.Variable]:
    """Return variables whose types and shapes follow from one seed, and whose values from another."""
    dice, noise = random.Random(seed), np.random.RandomState(values)
    drawn = {}
    for number in range(dice.randrange(1, 9)):
        shape = [dice.randrange(5) for _ in range(dice.randrange(4))]
        drawn[f"v{number}"] = tf.Variable(tf.cast(np.asarray(9 * noise.randn(*shape)), dice.choice(DTYPES)))
    return drawn | {"text": tf.Variable(noise.bytes(noise.randint(40))), "step": tf.Variable(0, dtype=tf.int64)}


def bits(variables: dict[str, tf.Variable]) -> list[bytes]:
    return [snapshots.read_octets(variable).tobytes() for variable in variables.values()]


def alone(own: tuple[int, ...], variables: dict[str, tf.Variable]) -> MemorySnapshots:
    return MemorySnapshots(own, tf.train.Checkpoint(**variables), lambda number: [number], None)


class Gang:
    """Tasks in threads, with collectives between them."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size), [None] * size
        self._size = size

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(work, range(self._size)))

    def exchange(self, task: int, value: Any) -> list[Any]:
        self._given[task] = value
        self._barrier.wait(60)
        everything = list(self._given)
        self._barrier.wait(60)
        return everything

    def snapshots(self, task: int, own: tuple[int, ...], variables: dict[str, tf.Variable], divided: bool) -> Any:
        return MemorySnapshots(
            own,
            tf.train.Checkpoint(**variables),
            lambda number: self.exchange(task, number),
            None if divided else lambda words, replica: self.exchange(task, words)[replica].copy(),
        )


@pytest.mark.parametrize("seed", range(40))
def test_a_torn_or_changed_snapshot_leaves_every_bit_of_the_one_before(files, seed):
    dice, own, written = random.Random(seed), files(), state(seed, values=1)
    taken = alone(own, written)
    for step in range(3):
        written["step"].assign(step)
        taken.write(step)
    before = bits(written)
    for variable, value in zip(written.values(), state(seed, values=2).values(), strict=True):
        variable.assign(value)
    taken.write(3)
    size = os.fstat(own[1]).st_size
    if dice.randrange(2):
        os.ftruncate(own[1], dice.randrange(size))
    else:
        at = dice.randrange(size)
        changed = os.pread(own[1], 1, at)[0] ^ 1 << dice.randrange(8)
        os.pwrite(own[1], bytes([changed]), at)
    other = state(seed, values=3)
    assert 2 == alone(own, other).restore(0)
    assert before == bits(other)


@pytest.mark.parametrize("seed", range(5))
def test_a_rehearsed_step_leaves_no_bit_changed(seed):
    variables, others = state(seed), state(seed, values=1)
    before = bits(variables)
    with snapshots.unchanged(tf.train.Checkpoint(**variables)):
        for variable, other in zip(variables.values(), others.values(), strict=True):
            variable.assign(other)
        assert bits(others) == bits(variables) != before
    assert before == bits(variables)


def test_the_state_of_other_variables_is_not_restored(files):
    own = files()
    alone(own, {"a": tf.Variable(1.0)}).write(7)
    for other in ({"b": tf.Variable(1.0)}, {"a": tf.Variable(1)}, {"a": tf.Variable([1.0])}):
        assert alone(own, other).restore(NONE) is None


@pytest.mark.parametrize(("seed", "room"), [*((seed, True) for seed in range(6)), (0, False)])
def test_a_task_without_the_snapshot_gets_that_of_another_and_keeps_it_if_there_is_room(files, monkeypatch, seed, room):
    monkeypatch.setattr(snapshots, "CHUNK", 5)
    size, gang = 3, Gang(3)
    dice = random.Random(seed)
    states = [state(seed, values=1) for _ in range(size)]
    pairs = [files() for _ in range(size)]
    for task in range(size):
        alone(pairs[task], states[task]).write(1)
    holder = dice.randrange(size)  # the others died before they had written it
    for variable, value in zip(states[holder].values(), state(seed, values=2).values(), strict=True):
        variable.assign(value)
    alone(pairs[holder], states[holder]).write(2)
    expected = bits(states[holder])
    dead = dice.choice([task for task in range(size) if task != holder])
    pairs[dead] = files()  # with its agent
    if not room:
        monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    fresh = [state(seed, values=10 + task) for task in range(size)]
    restored = gang.together(lambda task: gang.snapshots(task, pairs[task], fresh[task], False).restore(NONE))
    assert [2] * size == restored
    assert [expected] * size == [bits(each) for each in fresh]
    assert (2 if room else None) == alone(pairs[dead], fresh[dead]).restore(NONE)  # it has the snapshot from now on


def test_only_the_snapshot_of_the_chief_has_the_state_of_its_callbacks(files):
    gang = Gang(2)
    parts = [gang.snapshots(task, files(), state(3), False) for task in range(2)]
    for task, step in ((0, 4), (1, 4), (1, 5)):
        parts[task].needs_chief = True
        parts[task].write(step)
    assert [4, 4] == gang.together(lambda task: parts[task].restore(NONE))
    parts[0].discard(0)  # lost with its agent
    assert [None, None] == gang.together(lambda task: parts[task].restore(NONE))


def test_stages_restore_the_newest_snapshot_that_every_stage_has_and_no_step_is_restored_that_was_repeated(files):
    gang, own, states = Gang(2), [files(), files()], [state(3, values=task) for task in range(2)]
    for step in (4, 5):
        alone(own[0], states[0]).write(step)
    alone(own[1], states[1]).write(4)
    parts = [gang.snapshots(task, own[task], states[task], True) for task in range(2)]
    assert [4, 4] == gang.together(lambda task: parts[task].restore(NONE))
    assert 4 == alone(own[0], states[0]).restore(NONE)
    alone(own[0], states[0]).write(6)
    assert [4, 4] == gang.together(lambda task: parts[task].restore(NONE))
    own[1] = files()  # with its agent: all begin again, or with a checkpoint
    parts = [gang.snapshots(task, own[task], states[task], True) for task in range(2)]
    assert [None, None] == gang.together(lambda task: parts[task].restore(NONE))
    assert alone(own[0], states[0]).restore(NONE) is None


@pytest.mark.parametrize(("sharing", "available", "kept"), [(1, 10_000, None), (1, 20_000, 2), (3, 20_000, None)])
def test_a_state_that_is_too_large_for_its_memory_is_not_kept(files, monkeypatch, capsys, sharing, available, kept):
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    taken = alone(files(), {"large": tf.Variable(tf.zeros([1000]))})
    taken.sharing = sharing
    taken.write(1)
    taken.write(2)
    assert (kept is None) == capsys.readouterr().out.count("warning")
    assert kept == taken.restore(NONE)


def test_the_room_is_looked_for_once_unless_the_files_were_emptied(files, monkeypatch):
    """What one file took is missing where the other is written."""
    own, variables = files(), {"large": tf.Variable(tf.zeros([1000]))}
    taken = alone(own, variables)
    taken.write(1)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    taken.write(2)
    assert 2 == taken.restore(NONE)
    taken.discard(2)
    assert 1 == taken.restore(NONE)
    assert taken.restore(3) is None
    taken.write(4)
    assert taken.restore(NONE) is None


@pytest.mark.parametrize("seed", range(10))
def test_snapshots_take_at_most_their_share_of_the_time(monkeypatch, seed):
    dice, now, taken_s = random.Random(seed), [0.0], [0.0]
    cost_s, call_s, waited_s = dice.uniform(0.001, 0.5), dice.uniform(0.01, 3.0), dice.choice([0.0, 0.1])

    def keep(_step: int) -> float:
        now[0] += cost_s + waited_s
        taken_s[0] += cost_s
        return waited_s

    monkeypatch.setattr(actions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    action = KeepSnapshot(keep)
    for call in range(2000):
        signals = Signals(snapshot=action.due(10))
        now[0] += call_s
        losses = {"loss": np.zeros(10)}
        action.after(CallProgress(10 * call, LoopResult(losses, signals), call_s, compiled=call == 0))
    most_s = KeepSnapshot.SHARE * (now[0] + KeepSnapshot.AHEAD_S)
    assert min(2000 * cost_s, most_s - 2 * cost_s) <= taken_s[0] <= most_s + cost_s
