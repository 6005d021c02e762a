"""Opens the dataset that a configuration names."""

from pathlib import Path

from cluster.contract.run.folder import RunFolder
from cluster.system.errors import ClusterError, RunFailed
from cluster.system.json_files import create_json, read_json
from cluster.system.messages import COMMAND
from train.config import TrainConfig
from train.data import blocks
from train.data.dataset_record import SPLITS, ArrayRecord, ShardRecord
from train.data.feeds import ArraySource
from train.data.function import reading
from train.data.function.reading import DATASET, FunctionRecord
from train.data.sources import Source
from train.data.stream import ShardSource


def open_source(config: TrainConfig, data_dir: Path, run: RunFolder | None = None) -> Source:
    """Return the source that a configuration names.

    `run` records the first generation's version of the data, which later generations use even if a newer one exists.
    """
    if run is None:
        return _open_version(config, data_dir)
    record = run.data_version
    if not record.exists():
        newest = _open_version(config, data_dir)
        create_json(record, {"version": newest.record.version, "num_shards": newest.num_shards})
    recorded = read_json(record)
    source = _open_version(config, data_dir, recorded["version"])
    if source.num_shards != recorded["num_shards"]:
        raise RunFailed(
            f"{config.dataset} has {source.num_shards} shards, and {recorded['num_shards']} when this run began, "
            f"which changes their order; run `{COMMAND} data.shard --name {config.dataset} "
            f"--shards {recorded['num_shards']}`, or start a new run"
        )
    return source


def _open_version(config: TrainConfig, data_dir: Path, version: str = "") -> Source:
    if config.source == "stream":
        return ShardSource(record=ShardRecord.find(data_dir, config.dataset, version))
    if config.source == "memory":
        return ArraySource(record=ArrayRecord.find(data_dir, config.dataset, version).cut(config.transformer.context))
    record = FunctionRecord.find(data_dir, config.dataset, version)
    if record.form == DATASET:
        return reading.FunctionSource(record=record, data_dir=data_dir)
    for split in SPLITS:
        reading.open_split(record, split, data_dir, config.seed)
    return reading.RandomAccessSource(record=record)


def explain(error: Exception) -> ClusterError | None:
    """Translate TensorFlow's error about the data; None for other errors."""
    return blocks.explain(error) or reading.explain(error)
