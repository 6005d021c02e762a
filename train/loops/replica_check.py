"""Silent corruption: the copies of the weights in all replicas are compared, bit for bit.

Synchronous replicas apply the same update to the same weights, so all copies have the same bits unless a processor or
a memory module has changed some (Dixit et al., "Silent Data Corruptions at Scale", arXiv:2102.11245). What a
checkpoint or a snapshot in memory is about to save is compared first. Where copies differ, the run continues from
the state saved before.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.contract.spec import ClusterSpec
from cluster.system.errors import EXIT_BUG, EXIT_PEER_LOST, ClusterError
from cluster.system.files import remove
from train.loops.loop import Action, CallProgress, Periodic, every
from train.saving.snapshots import checksum, read_octets
from train.saving.trees import unwrap


class ReplicasDiffer(ClusterError):
    """The weights of some replica have other bits; all tasks restart."""

    def __init__(self, message: str, *, faulty: bool) -> None:
        """Set the exit code, by which the agents name a `faulty` task and no other."""
        super().__init__(message)
        self.exit_code = EXIT_BUG if faulty else EXIT_PEER_LOST


class ReplicaCheck(Periodic):
    """Compares the copies of the trained weights and of the optimizer's variables."""

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

    def after(self, progress: CallProgress) -> None:
        if self.due(progress):
            self.compare(progress.step)

    def compare(self, step: int) -> None:
        """Compare all copies after `step` steps, where all tasks call it; raise ReplicasDiffer if their bits differ."""
        if not self._active or step == self._compared_at:
            return
        own = digests(self._variables(), self._devices)
        # One number for each task: equal ones mean equal copies, and a task whose own copies differ stands out.
        number = own[0] if len(set(own)) == 1 else hash((self._task, *own))
        numbers = list(self._gather(number))[:: self._devices] if len(self._tasks) > 1 else [number]
        common, votes = Counter(numbers).most_common(1)[0]
        if votes == len(numbers) and len(set(own)) == 1:
            self._compared_at = step
            return
        named = [name for name, found in zip(self._tasks, numbers, strict=True) if found != common]
        if 2 * votes <= len(numbers) or not named:  # no majority, or the copies of the only task
            named = self._tasks
        raise ReplicasDiffer(
            f"silent corruption: after step {step} copies of the weights differ in {' and '.join(named)}; a processor "
            "or its memory changed bits, or code that only some replicas run; if processors of several kinds compute "
            "different bits, end the checks with --check-replicas 0",
            faulty=self._task in named,
        )


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

    def __init__(self, request: Path, variables: Callable[[], Sequence[Any]], replicas: int) -> None:
        self._request, self._variables, self._replicas = request, variables, replicas

    def before(self, step: int) -> None:
        if not self._request.exists():
            return
        remove(self._request)
        dice = random.Random(os.urandom(8))  # noqa: S311  # not for cryptography
        replica = dice.randrange(self._replicas)
        copies = [copy_of(variable, replica) for variable in self._variables()]
        copy = dice.choice([each for each in copies if each.dtype == tf.float32 and each.shape.num_elements()])
        values = copy.numpy()
        bits = values.reshape(-1).view(np.uint32)
        index, bit = dice.randrange(bits.size), dice.randrange(30)  # the highest would make numbers infinite at once
        bits[index] ^= np.uint32(1 << bit)
        copy.assign(values)
        print(f"chaos: flipped bit {bit} of {copy.name}[{index}] in replica {replica} after step {step}", flush=True)
