"""Silent corruption: the copies of the weights in all replicas are compared, bit for bit.

Synchronous replicas apply the same update to the same weights, so all copies have the same bits unless a processor or
a memory module has changed some (Dixit et al., "Silent Data Corruptions at Scale", arXiv:2102.11245). What a
checkpoint or a snapshot in memory is about to save is compared first. Where copies differ, the run continues from
the state saved before.
"""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec
from cluster.system.errors import EXIT_BUG, EXIT_PEER_LOST, ClusterError
from cluster.system.files import remove
from train.loops.loop import Action, CallProgress, Periodic, every
from train.model.gradients import GradientPolicy
from train.saving.snapshots import checksum, read_octets
from train.saving.trees import unwrap


class ReplicasDiffer(ClusterError):
    """The weights of some replica have other bits; all tasks restart."""

    def __init__(self, message: str, *, faulty: bool) -> None:
        """Set the exit code, by which the agents name a `faulty` task and no other."""
        super().__init__(message)
        self.exit_code = EXIT_BUG if faulty else EXIT_PEER_LOST


class ReplicaCheck(Periodic):
    """Compares the copies of the variables, see `copied_variables`."""

    def __init__(
        self,
        spec: ClusterSpec,
        task: str,
        interval: int | str,
        variables: Callable[[], Sequence[Any]],
        gather: Callable[[int], Sequence[int]],
    ) -> None:
        """Prepare the comparison by `gather`, a collective operation that collects the numbers of all replicas' tasks.

        `interval` is the number of steps between two comparisons besides those before a checkpoint; `auto`: none; 0: no
        comparison. `variables` returns the variables, of either Keras.
        """
        self._active = spec.copies_weights and interval != 0
        super().__init__(every(interval if self._active and isinstance(interval, int) else 0))
        self._tasks = [member.name for member in spec.members] or [task]
        self._task, self._devices = task, spec.devices
        self._variables, self._gather = variables, gather
        self._compared_at = 0
        self._shortest_s = float("inf")

    def after(self, progress: CallProgress) -> None:
        if self.due(progress):
            self.compare(progress.step)

    def compare(self, step: int, *, again: bool = False) -> float:
        """Compare all copies after `step` steps, where all tasks call it; raise ReplicasDiffer if their bits differ.

        The copies of a step are compared once, unless this is to happen `again`. Returns for how many seconds this
        waited for slower tasks: what the exchange took longer than the shortest one.
        """
        if not self._active or (step == self._compared_at and not again):
            return 0.0
        own = digests(self._variables(), self._devices)
        # One number for each task: equal ones mean equal copies, and a task whose own copies differ stands out.
        number = own[0] if len(set(own)) == 1 else hash((self._task, *own))
        began = time.monotonic()
        numbers = list(self._gather(number))[:: self._devices] if len(self._tasks) > 1 else [number]
        exchange_s = time.monotonic() - began
        self._shortest_s = min(self._shortest_s, exchange_s)
        common, votes = Counter(numbers).most_common(1)[0]
        if votes == len(numbers) and len(set(own)) == 1:
            self._compared_at = step
            return exchange_s - self._shortest_s
        named = [name for name, found in zip(self._tasks, numbers, strict=True) if found != common]
        if 2 * votes <= len(numbers) or not named:  # no majority, or the copies of the only task
            named = self._tasks
        with contextlib.suppress(tf.errors.OpError):  # a task that ended now would keep its number from the others
            self._gather(0)
        raise ReplicasDiffer(
            f"silent corruption: after step {step} copies of the weights differ in {' and '.join(named)}; a processor "
            "or its memory changed bits, or code that only some replicas run; if processors of several kinds compute "
            "different bits, end the checks with --check-replicas 0",
            faulty=self._task in named,
        )


def copied_variables(model: Any, policy: GradientPolicy) -> list[Any]:
    """Return the variables whose copies must be equal: weights, also frozen ones, and what the updates depend on.

    Seeds and whole numbers of layers may differ by design, and so may what replicas only bring together to read it. In
    moving averages, which are a mean over replicas, a difference lasts until the next step.
    """
    on_read = tf.VariableSynchronization.ON_READ
    weights = [each for each in model.weights if tf.as_dtype(each.dtype).is_floating]
    scale = policy.loss_scale.variables if policy.loss_scale else ()
    return [*(each for each in weights if unwrap(each).synchronization != on_read), *policy.optimizer.variables, *scale]


def digests(variables: Sequence[Any], replicas: int) -> list[int]:
    """Return the checksum of the copies in each of this task's replicas."""
    copies = [[copy_of(variable, replica) for variable in variables] for replica in range(replicas)]
    return [checksum(read_octets(copy) for copy in each if copy.dtype != tf.string) for each in copies]


def copy_of(variable: Any, replica: int) -> tf.Variable:
    """Return the copy of a variable in one of this task's replicas."""
    whole = unwrap(variable)
    return whole.values[replica] if isinstance(whole, tf.distribute.DistributedValues) else whole


class FlipBit(Action):
    """Flips a bit of a weight or of an optimizer's variable in one replica, as `invoke chaos flip` requests."""

    BITS = range(12, 30)
    """The next update often rounds lower bits away, without any effect; the highest makes numbers infinite at once."""
    LEAST = 1e-30
    """Numbers that are smaller soon become zero, whichever bit of them changes."""

    def __init__(self, run: RunFolder, task: str, variables: Callable[[], Sequence[Any]], replicas: int) -> None:
        self._run, self._task, self._variables, self._replicas = run, task, variables, replicas
        self._request = run.flip_request(task)

    def before(self, step: int) -> None:
        if not self._request.exists():
            return
        dice = random.Random(os.urandom(8))  # noqa: S311  # not for cryptography
        replica = dice.randrange(self._replicas)
        variables = [each for each in self._variables() if copy_of(each, replica).dtype == tf.float32]
        places = {at: self._places(copy_of(each, replica)) for at, each in enumerate(variables)}
        if not (used := [at for at, found in places.items() if found.size]):
            return  # all weights are still zero
        remove(self._request)
        at, bit = dice.choice(used), dice.choice(self.BITS)
        index, copy = int(dice.choice(places[at])), copy_of(variables[at], replica)
        values = np.array(copy.numpy())  # that of a scalar is a number, whose bits cannot be changed in place
        values.reshape(-1).view(np.uint32)[index] ^= np.uint32(1 << bit)
        copy.assign(values)
        name = getattr(variables[at], "path", copy.name)
        self._run.event(self._task, "flipped", step=step, variable=name, index=index, bit=bit, replica=replica)

    def _places(self, copy: tf.Variable) -> np.ndarray:
        """Return the indices of the values that a flipped bit changes for long: `[N] int64`."""
        return np.flatnonzero(np.abs(copy.numpy()) > self.LEAST)
