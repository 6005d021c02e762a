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


@pytest.fixture
def data_dir(tmp_path) -> Path:
    return tmp_path / "data"


def prepare(data_dir: Path, version: str, value: float, labels: str = "float32") -> None:
    """Prepare ten examples whose features all have one value."""
    features = np.full((10, 3), value, np.float32)
    parts = (features, np.arange(10).astype(labels))
    arrays.write_arrays(data_dir, "own:numbers", version, {"train": parts, "test": tuple(part[:4] for part in parts)})


def shard(data_dir: Path, version: str, value: float, num_shards: int = 3) -> None:
    """Shard twelve examples whose features all have one value."""
    examples = [(np.full(2, value, np.float32), i) for i in range(12)]
    listed_examples.shard(data_dir, "numbers", ListedExamples(examples, examples[:5], version), num_shards)


def first_feature(source: sources.Source) -> float:
    """Return the first number of the first example that a source would train on."""
    return float(next(iter(source.train_dataset(BatchSlice(2, 7)))).features[0, 0])


@pytest.mark.parametrize(("config", "write"), [(ARRAYS, prepare), (SHARDS, shard)], ids=["arrays", "shards"])
def test_a_later_generation_uses_the_data_of_the_first(make_run, data_dir, config, write):
    run = make_run(workers=0)
    write(data_dir, "1", 1.0)
    assert 1.0 == first_feature(sources.open_source(config, data_dir, run))
    write(data_dir, "2", 2.0)
    assert 1.0 == first_feature(sources.open_source(config, data_dir, run))
    assert "1" == sources.open_source(config, data_dir, run).version
    assert 2.0 == first_feature(sources.open_source(config, data_dir, make_run("another", workers=0)))
    assert 2.0 == first_feature(sources.open_source(config, data_dir))
    recorded = {"version": "1", "num_shards": 3 if config is SHARDS else 0}
    assert recorded == read_json(run.control / "data.json")


def test_another_number_of_shards_is_refused_in_one_line(make_run, data_dir):
    run = make_run(workers=0)
    shard(data_dir, "1", 1.0)
    sources.open_source(SHARDS, data_dir, run)
    shard(data_dir, "1", 1.0, num_shards=4)
    with pytest.raises(RunFailed, match="invoke data.shard --name numbers --shards 3"):
        sources.open_source(SHARDS, data_dir, run)
    shard(data_dir, "1", 1.0, num_shards=3)
    assert 3 == sources.open_source(SHARDS, data_dir, run).num_shards


def test_data_that_is_gone_is_asked_for_by_its_version(make_run, data_dir):
    run = make_run(workers=0)
    prepare(data_dir, "1", 1.0)
    sources.open_source(ARRAYS, data_dir, run)
    store.path_of(data_dir, "arrays", "own:numbers", "1").rename(data_dir / "elsewhere")
    prepare(data_dir, "2", 2.0)
    with pytest.raises(PrerequisiteError, match="^own:numbers 1 is not prepared"):
        sources.open_source(ARRAYS, data_dir, run)


def test_data_that_was_never_prepared_is_not_recorded(make_run, data_dir):
    run = make_run(workers=0)
    with pytest.raises(PrerequisiteError):
        sources.open_source(ARRAYS, data_dir, run)
    assert not (run.control / "data.json").exists()
