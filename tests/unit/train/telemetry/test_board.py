"""What TensorBoard shows, read as it reads it, and what is recorded of the machine: nothing private."""

import getpass
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.util.tensor_util import make_ndarray

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Pace
from cluster.system.json_files import read_json, write_json
from train import presets
from train.config import Optimizer, TrainConfig
from train.settings import overrides
from train.telemetry import environment
from train.telemetry.metrics import Metrics, varied


def written(run: RunFolder, write: Callable[[Metrics], None]) -> EventAccumulator:
    metrics = Metrics(run, "chief", prints=False)
    write(metrics)
    metrics.flush()
    return EventAccumulator(str(run.tensorboard("chief"))).Reload()


def test_hparams_are_what_was_varied_and_nothing_else(make_run):
    config = TrainConfig(seed=7, optimizer=Optimizer(learning_rate=0.25)).pin()
    board = written(make_run(), lambda metrics: metrics.hparams(config, {"eval_accuracy": 0.5}))
    content = board.PluginTagToContent("hparams")[hparams_metadata.SESSION_START_INFO_TAG]
    info = hparams_metadata.parse_session_start_info_plugin_data(content)
    shown = info.hparams
    assert "run" == info.group_name
    assert {"preset", "seed", "optimizer.learning_rate"} == set(shown)
    assert (7, 0.25) == (shown["seed"].number_value, shown["optimizer.learning_rate"].number_value)
    assert "hparam/eval_accuracy" in board.Tags()["tensors"]


@pytest.mark.parametrize("preset", presets.list_presets())
def test_a_preset_varies_nothing(preset):
    assert {} == varied(overrides.resolve_config(preset, []))


def test_numbers_are_grouped_and_the_known_shares_of_a_step_are_shown(make_run):
    values = {"loss": 1.0, "accuracy": 0.5, "examples_per_s": 9.0, "eval_loss": 1.0, "eval_top_5": 0.9, "skipped": None}

    def write(metrics: Metrics) -> None:
        metrics.log(5, 0.5, 10, values)
        metrics.shares(5, Pace(steps=3, input_share=0.25))

    board = written(make_run(), write)
    (share,) = board.Tensors("perf/input_share")
    assert (5, 0.25) == (share.step, float(make_ndarray(share.tensor_proto)))
    logged = {"train/loss", "train/accuracy", "perf/examples_per_s", "eval/loss", "eval/top_5"}
    assert logged | {"perf/input_share"} == set(board.Tags()["tensors"])


def test_only_variables_that_matter_are_reported_and_no_path(monkeypatch):
    given = {"TF_ENABLE_ONEDNN_OPTS": "0", "XLA_FLAGS": "--xla_dump_to=/home/somebody/dump"}
    found = environment.relevant_variables(given | {"TF_CONFIG": "{}", "AWS_SECRET_ACCESS_KEY": "secret"})
    assert "0" == found.pop("TF_ENABLE_ONEDNN_OPTS")
    assert found.pop("XLA_FLAGS").startswith("sha256:")
    assert {} == found


def test_the_manifest_gets_the_data_and_the_environment(run):
    write_json(run.manifest, {"schema": 1})
    record = SimpleNamespace(version="3.0.1", files=(), source_files={})
    environment.record_environment(run, "fashion_mnist", SimpleNamespace(record=record, in_memory=False))
    manifest = read_json(run.manifest)
    assert (1, "3.0.1") == (manifest["schema"], manifest["data"]["version"])
    assert manifest["environment"] == read_json(run.environment)
    assert {"tensorflow-cpu", "keras", "numpy"} <= set(manifest["environment"]["packages"])
    assert manifest["environment"]["cpu"]["model"]
    text = json.dumps(manifest)
    assert str(Path.home()) not in text
    assert f'"{getpass.getuser()}"' not in text
