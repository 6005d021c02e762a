"""Integrity checks of prepared files on reading, by hashes of blocks that were recorded on writing.

They detect damage that does not change a file's size before anything is trained on it, even on remote workers: the hash
(FarmHash's stable 64-bit fingerprint) is a TensorFlow operation, which any graph can contain. It takes a quarter of the
time of reading the file.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from cluster.system.errors import RunFailed
from cluster.system.files import sha256
from train.data.dataset_record import BLOCK_BYTES, advice

_DAMAGE = re.compile(r"damaged prepared data: block (\d+) of ([^\]\n]+)")


def hash_blocks(path: Path) -> tuple[int, ...]:
    """Return the hash of each block of a file."""
    with path.open("rb") as file:
        return tuple(int(_hash(tf.constant(block))) for block in iter(lambda: file.read(BLOCK_BYTES), b""))


def check_blocks(path: Path, expected: Sequence[int]) -> None:
    """Check a file's blocks without keeping them in memory."""
    for number, (current, recorded) in enumerate(zip(hash_blocks(path), expected, strict=True)):
        if current != recorded:
            raise damage_error(path, number)


def read_checked(path: tf.Tensor | str, expected: tf.Tensor | Sequence[int]) -> tf.Tensor:
    """Check a file's blocks and return its contents, a string scalar; eagerly or inside a graph."""
    raw, path, expected = tf.io.read_file(path), tf.convert_to_tensor(path), tf.convert_to_tensor(expected, tf.int64)
    starts = tf.range(tf.size(expected, tf.int64)) * BLOCK_BYTES
    current = tf.map_fn(lambda start: _hash(tf.strings.substr(raw, start, BLOCK_BYTES)), starts, parallel_iterations=1)
    wrong = tf.where(current != expected)[:, 0]
    if tf.executing_eagerly():
        if len(wrong):
            raise damage_error(Path(os.fsdecode(path.numpy())), int(wrong[0]))
        return raw
    message = tf.strings.join(
        ["damaged prepared data: block ", tf.strings.reduce_join(tf.strings.as_string(wrong[:1]))]
    )
    good = tf.debugging.Assert(tf.size(wrong) == 0, [tf.strings.join([message, " of ", path])])
    with tf.control_dependencies([good]):
        return tf.identity(raw)


def explain(error: Exception) -> RunFailed | None:
    """Translate TensorFlow's error about a damaged block; None for other errors."""
    match = _DAMAGE.search(str(error))
    return damage_error(Path(match[2]), int(match[1])) if match else None


def damage_error(path: Path, block: int) -> RunFailed:
    """Return the error of a damaged block, with the command that fixes it."""
    kind = path.parent.parent.name
    name = json.loads((path.parent / f"{kind}.json").read_text(encoding="utf-8"))["name"]
    return RunFailed(
        f"{path} is damaged in block {block} (from byte {block * BLOCK_BYTES}): it has changed since it was prepared; "
        f"{advice(kind, name)}, then start again"
    )


def digests(path: Path) -> dict[str, str]:
    """Return the sha256 of a file and the hashes of its blocks, for its entry in a record."""
    return {"sha256": sha256(path), "blocks": " ".join(f"{value:016x}" for value in hash_blocks(path))}


def _hash(block: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_hash_bucket_fast(block, 2**63 - 1)
