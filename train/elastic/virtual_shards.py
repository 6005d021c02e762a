"""Virtual shards of the global batch, of which each replica computes some, one after the other.

Without `--bitwise-elastic` their number is that of the replicas, so that a shard is a replica's batch.
"""

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class VirtualShards:
    """The shards of every global batch, assigned to the replicas in order and as evenly as possible."""

    total: int
    """Shards of a global batch."""
    replicas: int
    """Number of replicas, at most `total`."""

    @property
    def most(self) -> int:
        """Largest number of shards of a replica."""
        return -(-self.total // self.replicas)

    def first(self, replica: int) -> int:
        """Return the first shard of a replica; for the replica after the last, the number of all shards."""
        even, more = divmod(self.total, self.replicas)
        return replica * even + min(replica, more)

    def list_shards(self, replica: tf.Tensor) -> tf.Tensor:
        """Return the shards of a replica, `[n] int64`, where `replica` is a tensor, an int64 scalar."""
        firsts = tf.constant(self._firsts, tf.int64)
        return tf.range(firsts[replica], firsts[replica + 1])

    def place(self, shard: tf.Tensor) -> tf.Tensor:
        """Return a shard's index among those of its replica, int64 scalar."""
        firsts = tf.constant(self._firsts, tf.int64)
        return shard - tf.reduce_max(tf.where(firsts <= shard, firsts, 0))

    @property
    def _firsts(self) -> list[int]:
        return [self.first(replica) for replica in range(self.replicas + 1)]
