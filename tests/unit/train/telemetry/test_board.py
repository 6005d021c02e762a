"""What TensorBoard shows, read from the event files as it reads them."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.pr_curve import metadata as pr_metadata
from tensorboard.util.tensor_util import make_ndarray

from cluster.contract.run.folder import RunFolder
from train import presets
from train.config import Optimizer, TrainConfig
from train.settings import overrides
from train.telemetry import pictures
from train.telemetry.metrics import MAX_CURVES, Metrics, varied

PRECISION, RECALL = pr_metadata.PRECISION_INDEX, pr_metadata.RECALL_INDEX


def written(run: RunFolder, write: Callable[[Metrics], None]) -> EventAccumulator:
    metrics = Metrics(run, "chief", prints=False)
    write(metrics)
    metrics.close()
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


@pytest.mark.parametrize("preset", presets.names())
def test_a_preset_varies_nothing(preset):
    assert {} == varied(overrides.resolve(preset, []))


def test_a_class_that_is_always_right_has_a_perfect_curve(make_run):
    truth_N = np.array([0, 1, 2, 0])
    shares_NK = np.array([[0.9, 0.05, 0.05], [0.05, 0.15, 0.8], [0.05, 0.9, 0.05], [0.9, 0.05, 0.05]])
    board = written(make_run(), lambda metrics: metrics.pr_curves(3, ["boot", "bag", "coat"], truth_N, shares_NK))
    assert {"pr/boot", "pr/bag", "pr/coat"} == set(board.PluginTagToContent(pr_metadata.PLUGIN_NAME))
    curves = {name: board.Tensors(f"pr/{name}")[0] for name in ("boot", "bag")}
    assert {3} == {each.step for each in curves.values()}
    boot, bag = (make_ndarray(each.tensor_proto) for each in curves.values())
    middle = boot.shape[1] // 2
    assert (1.0, 1.0) == (boot[PRECISION, middle], boot[RECALL, middle])
    assert (0.0, 0.0) == (bag[PRECISION, middle], bag[RECALL, middle])


def test_many_classes_share_a_curve(make_run):
    count = MAX_CURVES + 1
    names = [str(at) for at in range(count)]
    board = written(make_run(), lambda metrics: metrics.pr_curves(1, names, np.arange(count), np.eye(count)))
    assert {"pr/all classes"} == set(board.PluginTagToContent(pr_metadata.PLUGIN_NAME))


def test_numbers_are_grouped(make_run):
    values = {"loss": 1.0, "accuracy": 0.5, "examples_per_s": 9.0, "eval_loss": 1.0, "eval_top_5": 0.9, "skipped": None}
    board = written(make_run(), lambda metrics: metrics.log(5, 0.5, 10, values))
    assert {"train/loss", "train/accuracy", "perf/examples_per_s", "eval/loss", "eval/top_5"} == set(
        board.Tags()["tensors"]
    )


def test_restarts_and_checkpoints_are_a_table_that_no_cause_breaks(make_run):
    run = make_run()
    run.event("chief", "checkpoint", step=3)
    run.event("worker-0", "gang restart", step=4, cause="killed | twice\nby somebody")
    board = written(run, lambda metrics: metrics.events(7, run.events()))
    (shown,) = board.Tensors("run/events")
    html = plugin_util.markdown_to_safe_html(make_ndarray(shown.tensor_proto).item())
    cells = re.findall("<td>(.*?)</td>", html)
    assert 7 == shown.step
    assert [["3", "0", "checkpoint", "chief", ""], ["4", "0", "gang restart", "worker-0"]] == [cells[:5], cells[5:9]]
    assert [r"killed | twice\nby somebody"] == cells[9:]


def test_a_confusion_matrix_is_blue_on_its_diagonal_and_red_elsewhere():
    names = ["boot", "bag", "coat"]
    picture_HWC = pictures.confusion(names, np.array([0, 1, 2, 2]), np.array([0, 1, 1, 1]))
    left = picture_HWC.shape[1] - pictures.CELL * len(names) - pictures.MARGIN
    corner_KK = [[picture_HWC[left + row * pictures.CELL + 2, left + column * pictures.CELL + 2].tolist()
                  for column in range(3)] for row in range(3)]  # fmt: skip
    blue, red, white = pictures.BLUE.tolist(), pictures.RED.tolist(), pictures.WHITE.tolist()
    assert [[blue, white, white], [white, blue, white], [white, red, white]] == corner_KK
