"""A made-up dataset of any size that is written once and streamed from disk, trained on under three strategies.

    python -m benchmarks.streamed [--gigabytes 10]

It writes `<DATA_DIR>/streamed/` unless it is there, trains one epoch undisturbed by one process, then under three
strategies with a SIGKILL halfway, and compares the weights: they must be the same, bit for bit. Batches are cut into
two virtual shards, each a shard of the dataset.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from train.config import Optimizer, TrainConfig

SHAPE = (128, 128, 4)
PIXELS = 128 * 128 * 4
RECORD_BYTES = PIXELS + 1
CLASSES = 4
FILES = 16
TEST_EXAMPLES = 256
GLOBAL_BATCH = 128
BLOCK = 256
TOPOLOGIES = {"one": "--workers=0", "mirrored": "--workers=0 --devices=2", "multiworker": "--workers=1"}


def write(data_dir: Path, gigabytes: float) -> int:
    """Write the files unless they are there; return how many examples there are to train on."""
    folder = data_dir / "streamed"
    folder.mkdir(parents=True, exist_ok=True)
    in_file = max(GLOBAL_BATCH, round(gigabytes * 1e9 / RECORD_BYTES / FILES))
    counts = {f"train-{number:02}.bin": in_file for number in range(FILES)} | {"test-00.bin": TEST_EXAMPLES}
    for number, (name, count) in enumerate(counts.items()):
        path = folder / name
        if path.exists() and path.stat().st_size == count * RECORD_BYTES:
            continue
        random = np.random.default_rng(number)
        with path.with_suffix(".part").open("wb") as file:
            for first in range(0, count, BLOCK):
                file.write(_block(random, min(BLOCK, count - first)))
        path.with_suffix(".part").rename(path)
    return in_file * FILES


def _block(random: np.random.Generator, count: int) -> bytes:
    """Return records: noise whose brightest quarter is the class, and the class."""
    records = random.integers(0, 256, (count, RECORD_BYTES), dtype=np.uint8)
    labels = records[:, -1] = records[:, -1] % CLASSES
    images = records[:, :-1].reshape(count, *SHAPE)
    for label in range(CLASSES):
        top, left = 64 * (label // 2), 64 * (label % 2)
        images[labels == label, top : top + 64, left : left + 64] |= 64
    return records.tobytes()


def data(split: str, shard: Any) -> tf.data.Dataset:
    """Return the examples of a shard, read from its files."""
    paths = sorted((shard.data_dir / "streamed").glob(f"{split}-*.bin"))
    paths = paths[shard.index :: shard.count]
    count = sum(path.stat().st_size for path in paths) // RECORD_BYTES
    files = tf.data.Dataset.from_tensor_slices([str(path) for path in paths])
    if split == "train":
        files = files.shuffle(len(paths), seed=shard.seed)
    records = files.interleave(
        lambda path: tf.data.FixedLengthRecordDataset(path, RECORD_BYTES), cycle_length=2, block_length=16
    )
    if split == "train":
        records = records.shuffle(1000, seed=shard.seed)

    def example(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.io.decode_raw(record, tf.uint8)
        return tf.reshape(values[:-1], SHAPE), values[-1]

    return records.map(example).apply(tf.data.experimental.assert_cardinality(count))


def model(feature_shape: tuple[int, ...], num_outputs: int) -> keras.Model:
    """Return a small model: what is measured is reading."""
    layers = keras.layers
    images = keras.Input(feature_shape, name="image")
    features = layers.Rescaling(1 / 127.5, offset=-1)(layers.AveragePooling2D(16)(images))
    features = layers.Dense(32, "relu")(layers.Flatten()(features))
    return keras.Model(images, layers.Dense(num_outputs, dtype="float32")(features))


def preset() -> TrainConfig:
    """Return one epoch of it."""
    return TrainConfig(
        source="function",
        dataset="benchmarks.streamed:data",
        num_outputs=CLASSES,
        model="benchmarks.streamed:model",
        global_batch=GLOBAL_BATCH,
        epochs=1,
        bitwise_elastic=2,
        steps_per_loop=5,
        checkpoint_every=20,
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=0),
    )


def train(name: str, topology: str, kill_at: int = 0) -> dict[str, Any]:
    """Train under a topology, with a SIGKILL at some step, if any; return the run's summary."""
    words = ["up", f"--name={name}", "--fresh", "--runtime=local", "--tensorboard-port=0", *topology.split()]
    _invoke(*words, "--preset=benchmarks.streamed:preset", *(["--detach"] if kill_at else []))
    if kill_at:
        victim = "worker-0" if topology == TOPOLOGIES["multiworker"] else "chief"
        _invoke("chaos", "kill", victim, f"--run={name}", f"--at-step={kill_at}")
        _invoke("wait", name)
    folder = Path(os.environ.get("RUNS_DIR", "runs")) / name
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def _invoke(*words: str) -> None:
    environment = os.environ | {"STANDBY": os.environ.get("STANDBY", "0")}
    subprocess.run([sys.executable, "-m", "invoke", *words], check=True, env=environment, stdout=sys.stderr)


def main(arguments: list[str]) -> int:
    """Write the data, train, print what was measured as JSON; return 1 where bits differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streamed", description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of examples to train on (%(default)s)")
    parser.add_argument("--strategies", default=",".join(TOPOLOGIES), help="of them (%(default)s)")
    options = parser.parse_args(arguments)
    examples = write(Path(os.environ.get("DATA_DIR", "data")).resolve(), options.gigabytes)
    steps = -(-examples // GLOBAL_BATCH)
    runs = {"undisturbed": train("streamed-undisturbed", TOPOLOGIES["one"])}
    for strategy in options.strategies.split(","):
        runs[strategy] = train(f"streamed-{strategy}", TOPOLOGIES[strategy], kill_at=steps // 2)
    rows = {
        name: {
            "state": run["state"],
            "weights_sha256": run["weights_sha256"],
            "wall_s": run["wall_s"],
            "examples_per_s": run["examples_per_s"],
            "eval_accuracy": run["metrics"].get("eval_accuracy"),
            "restarts": [
                {key: each.get(key) for key in ("task", "resumed_s", "steps_lost")} for each in run["restarts"]
            ],
        }
        for name, run in runs.items()
    }
    same = len({run["weights_sha256"] for run in runs.values()}) == 1
    gigabytes = examples * RECORD_BYTES / 1e9
    print(json.dumps({"gigabytes": gigabytes, "steps": steps, "same_bits": same, "runs": rows}, indent=2))
    return 0 if same and all(len(run["restarts"]) == 1 for name, run in runs.items() if name != "undisturbed") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
