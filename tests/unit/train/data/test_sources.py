"""The data of a run: what every replica is fed, and that a run stays with the data that it began with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from cluster.system.errors import PrerequisiteError, RunFailed
from cluster.system.json_files import read_json
from train.config import TrainConfig
from train.data import arrays, memory, sources, store
from train.data.batches import BatchSlice, Replicas
from train.data.prepare import sharding

ARRAYS = TrainConfig(dataset="own:numbers")
SHARDS = TrainConfig(dataset="numbers", source="stream")


@pytest.fixture
def data_dir(tmp_path) -> Path:
    folder = tmp_path / "data"
    (folder / "scratch").mkdir(parents=True)
    return folder


def prepare(data_dir: Path, version: str, value: float, weighted: bool = False, labels: str = "float32") -> None:
    """Prepare ten examples whose features all have one value."""
    features = np.full((10, 3), value, np.float32)
    parts = (features, np.arange(10).astype(labels), *([np.ones(10, np.float32)] if weighted else []))
    scratch, splits = data_dir / "scratch", {"train": parts, "test": tuple(part[:4] for part in parts)}
    arrays.write(scratch, data_dir, "own:numbers", version, classes=(), splits=splits, source="", source_files={})


class Numbers:
    """Twelve examples to shard, whose features all have one value."""

    classes = ()

    def __init__(self, version: str, value: float) -> None:
        self.version, self.value = version, value

    def open(self) -> dict[str, int]:
        return {"train": 12, "test": 5}

    def examples(self, split: str) -> Iterator[tuple[Any, ...]]:
        return ((np.full(2, self.value, np.float32), i) for i in range(self.open()[split]))


def shard(data_dir: Path, version: str, value: float, num_shards: int = 3) -> None:
    """Shard them."""
    sharding.shard("numbers", data_dir, num_shards=num_shards, open_source=lambda *_: Numbers(version, value))


def first_feature(source: sources.Source) -> float:
    """Return the first number of the first example that a source would train on."""
    return float(next(iter(source.train_dataset(BatchSlice(2, 7)))).features[0, 0])


# Feeds


@pytest.mark.parametrize(("pipeline", "first"), [(0, 0), (1, 2), (2, 4)])
def test_a_tasks_share_is_its_own_replicas(pipeline, first):
    context = tf.distribute.InputContext(num_input_pipelines=3, input_pipeline_id=pipeline, num_replicas_in_sync=6)
    assert Replicas(6, first, 2) == Replicas.of(context)


# What a source reports


def test_arrays_report_what_they_are(data_dir):
    prepare(data_dir, "1", 0)
    source = sources.find(ARRAYS, data_dir)
    assert (False, 1, (3,), 10, 4) == (
        source.classifies, source.num_outputs, source.feature_shape, source.train_examples, source.test_examples,
    )  # fmt: skip
    assert source.arrays is not None
    prepare(data_dir, "2", 0, labels="int64")
    assert (True, 10) == (sources.find(ARRAYS, data_dir).classifies, sources.find(ARRAYS, data_dir).num_outputs)


def test_shards_report_what_they_are(data_dir):
    shard(data_dir, "1", 0)
    source = sources.find(SHARDS, data_dir)
    assert (True, 12, (2,), 12, 5, 3) == (
        source.classifies, source.num_outputs, source.feature_shape, source.train_examples, source.test_examples,
        source.num_shards,
    )  # fmt: skip
    assert source.arrays is None


# What a run began with


def test_a_later_life_uses_the_arrays_of_the_first(make_run, data_dir):
    run = make_run(workers=0)
    prepare(data_dir, "1", 1.0)
    assert 1.0 == first_feature(sources.find(ARRAYS, data_dir, run))
    prepare(data_dir, "2", 2.0)
    assert 1.0 == first_feature(sources.find(ARRAYS, data_dir, run))
    assert "1" == sources.find(ARRAYS, data_dir, run).version
    assert 2.0 == first_feature(sources.find(ARRAYS, data_dir, make_run("another", workers=0)))
    assert 2.0 == first_feature(sources.find(ARRAYS, data_dir))


def test_a_later_life_uses_the_shards_of_the_first(make_run, data_dir):
    run = make_run(workers=0)
    shard(data_dir, "1", 1.0)
    assert 1.0 == first_feature(sources.find(SHARDS, data_dir, run))
    shard(data_dir, "2", 2.0)
    assert 1.0 == first_feature(sources.find(SHARDS, data_dir, run))
    assert 2.0 == first_feature(sources.find(SHARDS, data_dir))
    assert {"version": "1", "num_shards": 3} == read_json(run.control / "data.json")


def test_another_number_of_shards_is_refused_in_one_line(make_run, data_dir):
    run = make_run(workers=0)
    shard(data_dir, "1", 1.0)
    sources.find(SHARDS, data_dir, run)
    shard(data_dir, "1", 1.0, num_shards=4)
    with pytest.raises(RunFailed) as refused:
        sources.find(SHARDS, data_dir, run)
    assert (
        "numbers has 4 shards, and 3 when this run began, which changes their order; run "
        "`invoke data.shard --name numbers --shards 3`, or start a new run"
    ) == str(refused.value)
    shard(data_dir, "1", 1.0, num_shards=3)
    assert 3 == sources.find(SHARDS, data_dir, run).num_shards


def test_data_that_is_gone_is_asked_for_by_its_version(make_run, data_dir):
    run = make_run(workers=0)
    prepare(data_dir, "1", 1.0)
    sources.find(ARRAYS, data_dir, run)
    store.path_of(data_dir, "arrays", "own:numbers", "1").rename(data_dir / "elsewhere")
    prepare(data_dir, "2", 2.0)
    with pytest.raises(PrerequisiteError, match="^own:numbers 1 is not prepared"):
        sources.find(ARRAYS, data_dir, run)


def test_what_was_never_prepared_is_not_recorded(make_run, data_dir):
    run = make_run(workers=0)
    with pytest.raises(PrerequisiteError):
        sources.find(ARRAYS, data_dir, run)
    assert not (run.control / "data.json").exists()


def test_weights_of_examples_are_fed(data_dir):
    prepare(data_dir, "1", 1.0, weighted=True)
    found = sources.find(ARRAYS, data_dir)
    assert found.arrays is not None
    assert memory.load(found.arrays.train).weights is not None
