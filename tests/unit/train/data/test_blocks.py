"""Prepared data is checked by block as it is read: damage of any size ends what reads it, naming the block."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import ClusterError, RunFailed
from cluster.system.files import sha256
from cluster.system.json_files import read_json
from tests.support.listed_examples import ListedExamples, shard
from train import program
from train.config import TrainConfig
from train.data import blocks, dataset_record
from train.data.batches import BatchSlice, Replicas
from train.data.dataset_record import ArrayRecord
from train.data.opening import open_source
from train.data.prepare import sharding
from train.data.prepare.preparation import write_arrays
from train.telemetry import environment

ARRAYS = TrainConfig(dataset="mnist")
SHARDS = TrainConfig(dataset="noise", source="stream")
BATCHES = BatchSlice(4, 7)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 100 bytes, so that small files have several."""
    for module in (blocks, dataset_record):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100)


@pytest.fixture
def data_dir(tmp_path) -> Path:
    folder = tmp_path / "data"
    images = np.random.default_rng(0).integers(0, 256, (50, 7, 7, 1), np.uint8)  # 24.5 blocks
    parts = (images, np.arange(50) % 10)
    write_arrays(folder, "mnist", "3.0.1", {"train": parts, "test": tuple(part[:9] for part in parts)})
    random = np.random.default_rng(5)
    noise = [(random.integers(0, 256, 50, np.uint8), i) for i in range(24)]  # a flipped bit is valid data
    shard(folder, "noise", ListedExamples(noise, noise[:7]), num_shards=3)
    return folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("part", ["features", "labels"])
@pytest.mark.parametrize(("at", "block"), [(0, 0), (99, 0), (100, 1), (-1, None)])
def test_a_flipped_bit_in_an_array_is_never_trained_on(data_dir, part, at, block):
    file = ArrayRecord.find(data_dir, "mnist").train.files[["features", "labels"].index(part)]
    flip(file.path, at)
    last = (file.size_bytes - 1) // 100
    source = open_source(ARRAYS, data_dir)  # the size is as it was
    with pytest.raises(RunFailed, match=rf"{file.path} is damaged in block {last if block is None else block} "):
        source.examples("train")
    with pytest.raises(RunFailed, match="invoke data.prepare --name mnist --fresh"):
        list(source.train_dataset(BATCHES).take(6))
    source.examples("test")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_shard_in_the_place_of_another_is_never_read(data_dir, split):
    """Its records are as good as those that belong there, and as many: their own checksums say nothing."""
    source = open_source(SHARDS, data_dir)
    first, second = (data_dir / "shards" / "noise-1" / f"{split}-{at:05}-of-00003.tfrecord" for at in (1, 2))
    first.write_bytes(second.read_bytes())
    evaluated = source.eval_dataset(4, Replicas())
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        list(evaluated if split == "test" else source.train_dataset(BATCHES).take(6))
    explained = str(program.explain(raised.value))
    assert f"{first} is damaged in block 0 " in explained
    assert "invoke data.shard --name noise --fresh" in explained


def test_shards_are_not_made_of_damaged_arrays(data_dir):
    flip(ArrayRecord.find(data_dir, "mnist").train.files[0].path, 500)
    with pytest.raises(RunFailed, match="damaged in block 5 "):
        sharding.write_shards("mnist", data_dir)
    assert not list(data_dir.glob("shards/mnist*"))


@pytest.mark.parametrize("config", [ARRAYS, SHARDS], ids=["arrays", "shards"])
def test_the_manifest_has_the_hashes_of_the_files(data_dir, config, make_run):
    run, source = make_run(workers=0), open_source(config, data_dir)
    environment.record_environment(run, config.dataset, source)
    recorded = read_json(run.manifest)["data"]["files"]
    assert {file.path.name: sha256(file.path) for file in source.record.files} == recorded


def test_a_hash_that_is_not_that_of_the_file_is_not_recorded(data_dir, make_run):
    run, source = make_run(workers=0), open_source(ARRAYS, data_dir)
    flip(source.record.files[0].path, 0)
    with pytest.raises(ClusterError, match="data.prepare --name mnist --fresh"):
        environment.record_environment(run, "mnist", source)
    assert "data" not in read_json(run.manifest, {})
