"""Detection of silent corruption: compares the copies of the weights in all replicas, bit for bit.

Synchronous replicas apply the same update to the same weights, so all copies have the same bits unless a processor or a
memory module has changed some (Dixit et al., "Silent Data Corruptions at Scale", arXiv:2102.11245). The copies are
compared before every checkpoint and after every in-memory snapshot. If they differ, the run continues from the state
that was saved before.
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

from cluster.contract.run.records import Place
from cluster.system.errors import EXIT_BUG, EXIT_PEER_LOST, ClusterError, UsageError
from cluster.system.files import remove
from train.context import TaskContext
from train.loops.loop import Action, CallProgress, Periodic, every
from train.model.gradients import GradientPolicy
from train.saving.snapshots import Gather, MemorySnapshots, checksum, read_octets
from train.saving.trees import unwrap


class ReplicasDiffer(ClusterError):
    """The weights of the replicas differ; all tasks restart."""

    def __init__(self, message: str, *, faulty: bool) -> None:
        """Set the exit code, by which the agents tell a `faulty` task from the others."""
        super().__init__(message)
        self.exit_code = EXIT_BUG if faulty else EXIT_PEER_LOST


class ReplicaCheck(Periodic):
    """Compares the copies of the variables, see `copied_variables`."""

    def __init__(
        self,
        context: TaskContext,
        variables: Callable[[], Sequence[Any]],
        gather: Gather,
        snapshots: MemorySnapshots | None = None,
    ) -> None:
        """`variables` returns the variables, of either Keras; `snapshots` of different copies are discarded."""
        spec, task, interval = context.spec, context.task.name, context.config.check_replicas
        self._active = spec.copies_weights and interval != 0
        super().__init__(every(interval if self._active and isinstance(interval, int) else 0))
        self._tasks = [member.name for member in spec.members] or [task]
        self._task, self._devices = task, spec.devices
        self._variables, self._gather, self._snapshots = variables, gather, snapshots
        self._positions = context.positions
        self._compared_at = 0
        self._shortest_s = float("inf")

    def after(self, progress: CallProgress) -> None:
        if self.due(progress):
            self.compare(progress.step)

    def compare(self, step: int, *, again: bool = False) -> float:
        """Compare all copies after `step` steps, at which all tasks call this.

        Raises ReplicasDiffer if they differ, or UsageError before the first step. A step is compared only once, unless
        `again` is set. Returns the seconds that this waited for slower tasks, estimated as the excess over the shortest
        exchange so far.
        """
        if not self._active or (step == self._compared_at and not again):
            return 0.0
        own = digests(self._variables(), self._devices)
        # One number per task: equal numbers mean equal copies, and a task whose own copies differ stands out.
        number = own[0] if len(set(own)) == 1 else hash((self._task, *own))
        began = time.monotonic()
        self._positions.set(Place.COMPARISON, step)
        numbers = list(self._gather(number))[:: self._devices] if len(self._tasks) > 1 else [number]
        self._positions.set(Place.COMPARISON, step, left=True)
        exchange_s = time.monotonic() - began
        self._shortest_s = min(self._shortest_s, exchange_s)
        common, votes = Counter(numbers).most_common(1)[0]
        if votes == len(numbers) and len(set(own)) == 1:
            self._compared_at = step
            return exchange_s - self._shortest_s
        named = [name for name, found in zip(self._tasks, numbers, strict=True) if found != common]
        if 2 * votes <= len(numbers) or not named:  # no majority, or a single task's copies differ
            named = self._tasks
        if self._snapshots:
            self._snapshots.discard(step)
        with contextlib.suppress(tf.errors.OpError):  # ending now would withhold this task's number from others
            self._gather(0)
        where = " and ".join(named)
        if step == 0:
            raise UsageError(
                f"the initial weights differ in {where}: --model draws numbers that do not depend on --seed, such as "
                "those of np.random.default_rng(); give it a seed"
            )
        raise ReplicasDiffer(
            f"silent corruption: after step {step} copies of the weights differ in {where}; a processor "
            "or its memory changed bits, or code that only some replicas run; if processors of several kinds compute "
            "different bits, end the checks with --check-replicas 0",
            faulty=self._task in named,
        )


def copied_variables(model: Any, policy: GradientPolicy) -> list[Any]:
    """Return the variables whose copies must be equal: float weights, frozen or not, and the state of updates.

    Left out are seeds and integer state of layers, which may differ by design, and ON_READ variables, which are only
    merged when read. In moving averages, which are means over replicas, a difference lasts until the next step.
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
    """The next update often rounds lower bits away, without any effect; a higher one makes numbers infinite at once."""
    LEAST = 1e-30
    """Numbers of a smaller magnitude soon become zero, whichever bit is flipped."""

    def __init__(self, context: TaskContext, variables: Callable[[], Sequence[Any]]) -> None:
        self._run, self._task, self._replicas = context.run, context.task.name, context.spec.devices
        self._variables, self._request = variables, context.run.flip_request(context.task.name)

    def before(self, step: int) -> None:
        if not self._request.exists():
            return
        dice = random.Random(os.urandom(8))  # noqa: S311  # not for cryptography
        replica = dice.randrange(self._replicas)
        variables = [each for each in self._variables() if copy_of(each, replica).dtype == tf.float32]
        # The values in which a flipped bit lasts.
        places = [np.flatnonzero(np.abs(copy_of(each, replica).numpy()) > self.LEAST) for each in variables]
        if not (used := [at for at, found in enumerate(places) if found.size]):
            return  # all weights are still zero
        remove(self._request)
        at, bit = dice.choice(used), dice.choice(self.BITS)
        index, copy = int(dice.choice(places[at])), copy_of(variables[at], replica)
        values = np.array(copy.numpy())  # a scalar's `numpy()` cannot be changed in place
        values.reshape(-1).view(np.uint32)[index] ^= np.uint32(1 << bit)
        copy.assign(values)
        name = getattr(variables[at], "path", copy.name)
        self._run.event(self._task, "flipped", step=step, variable=name, index=index, bit=bit, replica=replica)
