"""A naive input pipeline: one file after the other, record by record, with a shuffle buffer.

Each line is `{"batch": 100, "time": ...}`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import tensorflow as tf

GLOBAL_BATCH = 192
BUFFER = 10_000


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a record's image and class."""
    features = {"features": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(record, features)
    return tf.reshape(tf.io.decode_raw(example["features"], tf.uint8), [28, 28, 1]), example["label"]


def main() -> None:
    """Read batches and do nothing with them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=Path, required=True, help="folder of TFRecord files")
    parser.add_argument("--batches", type=int, default=500, help="to read (default: 500)")
    options = parser.parse_args()
    files = sorted(str(path) for path in options.shards.glob("train-*.tfrecord"))
    dataset = tf.data.TFRecordDataset(files).map(parse).shuffle(BUFFER).repeat().batch(GLOBAL_BATCH)
    for number, _ in enumerate(dataset.take(options.batches), 1):
        if number in (1, options.batches):
            print(json.dumps({"batch": number, "time": time.time()}), flush=True)


if __name__ == "__main__":
    main()
