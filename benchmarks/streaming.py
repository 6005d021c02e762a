"""The streaming source's pipeline alone, for `benchmarks.input`: each line is `{"batch": 100, "time": ...}`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.runs import GLOBAL_BATCH
from train.data.batches import BatchSlice
from train.data.dataset_record import ShardRecord
from train.data.stream import ShardSource


def main() -> None:
    """Read batches as one replica does, and do nothing with them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of the dataset")
    parser.add_argument("--batches", type=int, default=500, help="to read (default: 500)")
    options = parser.parse_args()
    source = ShardSource(record=ShardRecord.find(options.data_dir, options.name))
    dataset = source.train_dataset(BatchSlice(GLOBAL_BATCH, 42)).take(options.batches)
    for number, _ in enumerate(dataset, 1):
        if number in (1, options.batches):
            print(json.dumps({"batch": number, "time": time.time()}), flush=True)


if __name__ == "__main__":
    main()
