"""The data of a run: what every replica is fed, and that a run stays with the data that it began with."""

from pathlib import Path

import numpy as np
import pytest

from cluster.system.errors import PrerequisiteError, RunFailed
from cluster.system.json_files import read_json
from tests.support import listed_examples
from tests.support.listed_examples import ListedExamples
from train.config import TrainConfig
from train.data import arrays, sources, store
from train.data.batches import BatchSlice

ARRAYS = TrainConfig(dataset="own:numbers")
SHARDS = TrainConfig(dataset="numbers", source="stream")


def prepare(data_dir: Path, version: str, value: float) -> None:
    features = np.full((10, 3), value, np.float32)
    parts = (features, np.arange(10, dtype=np.float32))
    arrays.write_arrays(data_dir, "own:numbers", version, {"train": parts, "test": tuple(part[:4] for part in parts)})


def shard(data_dir: Path, version: str, value: float, num_shards: int = 3) -> None:
    examples = [(np.full(2, value, np.float32), i) for i in range(12)]
    listed_examples.shard(data_dir, "numbers", ListedExamples(examples, examples[:5], version), num_shards)


def first_feature(source: sources.Source) -> float:
    return float(next(iter(source.train_dataset(BatchSlice(2, 7)))).features[0, 0])


@pytest.mark.parametrize(("config", "write"), [(ARRAYS, prepare), (SHARDS, shard)], ids=["arrays", "shards"])
def test_a_later_generation_uses_the_data_of_the_first(make_run, tmp_path, config, write):
    run = make_run(workers=0)
    write(tmp_path, "1", 1.0)
    assert 1.0 == first_feature(sources.open_source(config, tmp_path, run))
    write(tmp_path, "2", 2.0)
    assert 1.0 == first_feature(sources.open_source(config, tmp_path, run))
    assert "1" == sources.open_source(config, tmp_path, run).version
    assert 2.0 == first_feature(sources.open_source(config, tmp_path, make_run("another", workers=0)))
    assert 2.0 == first_feature(sources.open_source(config, tmp_path))
    recorded = {"version": "1", "num_shards": 3 if config is SHARDS else 0}
    assert recorded == read_json(run.control / "data.json")


def test_another_number_of_shards_is_refused_in_one_line(run, tmp_path):
    shard(tmp_path, "1", 1.0)
    sources.open_source(SHARDS, tmp_path, run)
    shard(tmp_path, "1", 1.0, num_shards=4)
    with pytest.raises(RunFailed, match="invoke data.shard --name numbers --shards 3"):
        sources.open_source(SHARDS, tmp_path, run)
    shard(tmp_path, "1", 1.0, num_shards=3)
    assert 3 == sources.open_source(SHARDS, tmp_path, run).num_shards


def test_data_that_is_gone_is_asked_for_by_its_version(run, tmp_path):
    prepare(tmp_path, "1", 1.0)
    sources.open_source(ARRAYS, tmp_path, run)
    store.path_of(tmp_path, "arrays", "own:numbers", "1").rename(tmp_path / "elsewhere")
    prepare(tmp_path, "2", 2.0)
    with pytest.raises(PrerequisiteError, match="^own:numbers 1 is not prepared"):
        sources.open_source(ARRAYS, tmp_path, run)


def test_data_that_was_never_prepared_is_not_recorded(run, tmp_path):
    with pytest.raises(PrerequisiteError):
        sources.open_source(ARRAYS, tmp_path, run)
    assert not (run.control / "data.json").exists()
