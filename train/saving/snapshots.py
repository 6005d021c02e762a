"""In-memory snapshots of a task's state that survive its program, so that no step is repeated after a failure.

After calls of the inner loop, each task copies the contents of a checkpoint into one of two in-memory files in turn,
which its agent holds open (`cluster/contract/recovery/snapshot_files.py`): a kill during one write leaves the other
file intact. After a failure, tasks continue from the newest snapshot: each from its own, or from another task's, which
a collective operation copies. Source: Wang et al., GEMINI, SOSP 2023.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from cluster.system import memory
from cluster.system.messages import size
from train.saving.trees import Mirror, has_value

NONE = -1
"""Stands for the steps of a missing snapshot."""
CHUNK = 2**20
"""Number of 8-byte words that one collective operation copies."""
ROOM_SHARE = 0.5
"""Largest share of the available memory that the snapshots of all tasks of a machine may take."""
_HEADER, _LENGTH = struct.Struct("<qqqq"), struct.Struct("<q")
"""Header: steps plus 1, so that zeros mean no snapshot; hash of the layout; bytes of the values; the sum of all other
words. Each value is preceded by its length."""

Gather = Callable[[int], Sequence[int]]
"""Collective operation that collects a number from each replica's task."""
Broadcast = Callable[[np.ndarray, int], np.ndarray]
"""Collective operation that copies `[CHUNK] int64` from one replica's task to all tasks."""


class MemorySnapshots:
    """The snapshots of one task."""

    def __init__(
        self, files: Sequence[int], checkpoint: tf.train.Checkpoint, gather: Gather, broadcast: Broadcast | None
    ) -> None:
        """Use two files, given by descriptor. Without `broadcast`, as the tasks differ, each needs its own snapshot."""
        self._files, self._gather, self._broadcast = files, gather, broadcast
        self.sharing = 1
        """The number of tasks that share this machine's memory."""
        self.needs_chief = False
        """Whether the chief, the first task, needs its own snapshot, as other tasks have other callbacks' state."""
        # Build the tree now: a compiled model refers to its optimizer, which moves the variables in the tree.
        self._tree = _own_variables(checkpoint)
        pairs = zip(self._tree.paths, self._tree.pairs, strict=True)
        lines = [f"{path} {variable.dtype.name} {variable.shape}" for path, (variable, _) in pairs]
        self._layout = zlib.crc32("\n".join(lines).encode())  # only snapshots with the same hash can be restored
        self._warned = False

    def write(self, step: int) -> None:
        """Copy the state after `step` steps, at which all tasks call this; if the memory is too small, only warn."""
        values = [read_octets(variable) for variable, _ in self._tree.pairs]
        length = sum(8 + octets.size + _padding(octets) for octets in values)
        if not self._has_room(length):
            return
        parts = (
            part for octets in values for part in (_LENGTH.pack(octets.size), octets.data, bytes(_padding(octets)))
        )
        numbers = (step + 1, self._layout, length)
        digest = _signed(sum(numbers) + sum(octets.size + _sum_words(octets) for octets in values))
        _fill(min(self._files, key=_steps_of), _HEADER.pack(*numbers, digest), parts)

    def _has_room(self, length: int) -> bool:
        """Whether two snapshots of a length may be kept; the files of a task that keeps some already have theirs."""
        if any(os.fstat(file).st_size > _HEADER.size for file in self._files):
            return True
        needed = 2 * length
        has = memory.free_bytes() // self.sharing  # all look at the same time
        if needed > has * ROOM_SHARE and not self._warned:
            self._warned = True
            print(
                f"warning: no snapshots in memory: two need {size(needed)}, and this task's share of the free memory "
                f"is {size(has)}; after a failure the newest checkpoint is restored",
                flush=True,
            )
        return needed <= has * ROOM_SHARE

    def restore(self, newest_saved: int, newest_good: Callable[[], int] | None = None) -> int | None:
        """Restore the newest snapshot, of the same step in all tasks, which all call this; return the steps done in it.

        Returns None if there is none or a good checkpoint is newer. `newest_saved` is the step of the newest checkpoint
        found here; `newest_good`, a collective operation, returns that of the newest one that every task can read.
        """
        held = {_steps_of(file): file for file in self._files if self._is_complete(file)}
        newest, older = [*sorted(held, reverse=True), NONE, NONE][:2]
        all_held = list(zip(self._gather(newest), self._gather(older), strict=True))
        by_all = self._broadcast is None
        step = choose(all_held[:1] if self.needs_chief and not by_all else all_held, by_all=by_all)
        if step is not None and step < max(self._gather(newest_saved)) and (not newest_good or step < newest_good()):
            step = None
        if step is None:
            self.discard(0)
            return None
        content = _mapped(held[step]) if step in held else np.zeros(0, np.uint8)
        if any(step not in each for each in all_held):
            content = self._receive(content, next(at for at, each in enumerate(all_held) if step in each))
        if step not in held and self._has_room(content.size):
            _fill(min(self._files, key=_steps_of), content[: _HEADER.size].tobytes(), [content[_HEADER.size :].data])
        _assign_values(self._tree, _split(content))
        self.discard(step + 1)
        return step

    def discard(self, first: int) -> None:
        """Discard the snapshots of `first` and later steps; their empty headers remain."""
        for file in self._files:
            if _steps_of(file) >= first:
                _fill(file, bytes(_HEADER.size), ())

    def _is_complete(self, file: int) -> bool:
        """Whether a file has a complete snapshot of these variables."""
        *numbers, digest = _HEADER.unpack(os.pread(file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        steps_1, layout, length = numbers
        if not steps_1 or layout != self._layout or os.fstat(file).st_size != _HEADER.size + length:
            return False
        return _signed(sum(numbers) + _sum_words(_mapped(file)[_HEADER.size :])) == digest

    def _receive(self, own: np.ndarray, replica: int) -> np.ndarray:
        """Return a replica's snapshot, `[N] uint8`, to all tasks, of which some have the same as their `own`."""
        assert self._broadcast is not None
        length = self._gather(own.size)[replica]
        received = np.zeros(-(-length // (8 * CHUNK)) * CHUNK, np.int64)
        octets = received.view(np.uint8)
        octets[: own.size] = own[: octets.size]  # an old snapshot of another length is ignored
        for begin in range(0, received.size, CHUNK):
            received[begin : begin + CHUNK] = self._broadcast(received[begin : begin + CHUNK], replica)
        return octets[:length]


@contextmanager
def unchanged(checkpoint: tf.train.Checkpoint) -> Iterator[None]:
    """Restore the variables of a tree after the block."""
    tree = _own_variables(checkpoint)
    before = [read_octets(variable) for variable, _ in tree.pairs]
    yield
    _assign_values(tree, before)


def _own_variables(checkpoint: tf.train.Checkpoint) -> Mirror:
    """Return a tree without the variables that only other tasks have."""
    return Mirror(checkpoint, lambda variable: variable if has_value(variable) else None)


def _assign_values(tree: Mirror, values: Iterable[np.ndarray]) -> None:
    for (variable, _), octets in zip(tree.pairs, values, strict=True):
        if variable.dtype == tf.string:
            variable.assign(tf.constant(octets.tobytes()))
        else:
            array = octets.copy().view(variable.dtype.as_numpy_dtype)
            variable.assign(tf.constant(array.reshape(variable.shape.as_list())))


def choose(held: Sequence[Iterable[int]], *, by_all: bool) -> int | None:
    """Return the newest step of which some task has a snapshot, or every task if `by_all`; None if there is none."""
    sets = [set(each) - {NONE} for each in held]
    return max(set.intersection(*sets) if by_all else set.union(*sets), default=None)


def checksum(values: Iterable[np.ndarray]) -> int:
    """Return a 64-bit checksum of arrays, `[N] uint8` each: a weighted sum of their words.

    Each array has a different odd weight, so that a flipped bit or two swapped arrays change the checksum.
    """
    return _signed(sum((2 * index + 1) * _sum_words(octets) for index, octets in enumerate(values)))


def _sum_words(octets: np.ndarray) -> int:
    words = octets[: octets.size // 8 * 8].view(np.uint64)
    return int(words.sum(dtype=np.uint64)) + int.from_bytes(octets[words.nbytes :].tobytes(), "little")


def _signed(number: int) -> int:
    """Return the signed number of 64 bits that is congruent to a number."""
    return (number + 2**63) % 2**64 - 2**63


def _fill(file: int, header: bytes, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file, its header last; until then the file has no valid snapshot."""
    with open(file, "r+b", closefd=False) as stream:
        stream.seek(0)  # all programs of the task share the position
        stream.write(bytes(_HEADER.size))
        stream.flush()
        stream.writelines(parts)
        stream.truncate()
        stream.seek(0)
        stream.write(header)


def _steps_of(file: int) -> int:
    return int(_HEADER.unpack(os.pread(file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))[0]) - 1


def _mapped(file: int) -> np.ndarray:
    """Return the content of a file, `[N] uint8`, without a copy."""
    return np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8)


def _split(content: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the values of a snapshot, `[N] uint8` each."""
    at = _HEADER.size
    while at < content.size:
        (length,) = _LENGTH.unpack(content[at : at + _LENGTH.size].tobytes())
        octets = content[at + _LENGTH.size :][:length]
        yield octets
        at += _LENGTH.size + length + _padding(octets)


def _padding(octets: np.ndarray) -> int:
    return -octets.size % 8


def read_octets(variable: tf.Variable) -> np.ndarray:
    """Return the bytes of a variable's value, `[N] uint8`; of several equal copies, those of the first."""
    if isinstance(variable, tf.distribute.DistributedValues):
        if variable.synchronization == tf.VariableSynchronization.ON_READ:
            return _as_octets(variable.read_value())  # merges the copies of all tasks
        variable = variable.values[0]
    # Takes a quarter of the time of `read_value`.
    return _as_octets(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))


def _as_octets(value: tf.Tensor) -> np.ndarray:
    if value.dtype == tf.string:
        return np.frombuffer(value.numpy(), np.uint8)
    return np.asarray(value.numpy()).reshape(-1).view(np.uint8)
