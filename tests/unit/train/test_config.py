"""The training configuration: presets, overrides, ranges; a typo is refused with the nearest name."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.system.errors import UsageError
from cluster.system.files import ROOT
from tests.support import own_module
from train import presets
from train.config import Optimizer, TrainConfig
from train.settings.overrides import resolve_config


def refusal(*overrides: str, preset: str = "fashion_mnist") -> str:
    with pytest.raises(UsageError) as refused:
        resolve_config(preset, overrides)
    assert 1 == len(str(refused.value).splitlines())
    return str(refused.value)


@pytest.mark.parametrize("preset", presets.list_presets())
def test_a_preset_is_complete_and_in_range(preset):
    resolved = resolve_config(preset, [])
    assert preset == resolved.preset
    assert resolved == TrainConfig.from_json(resolved.to_json())


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        (["--global-batch=96"], "global_batch", 96),
        (["--global_batch", "96"], "global_batch", 96),
        (["--max-steps", "None"], "max_steps", None),
        (["--checkpoint-every", "200"], "checkpoint_every", 200),
        (["--checkpoint-every", "200", "--checkpoint-every", "0.1s"], "checkpoint_every", "0.1s"),
        (["--no-deterministic"], "deterministic", False),
        (["--no-optimizer.ema-evaluate"], "optimizer", Optimizer(ema_evaluate=False)),
        (["--optimizer.no-ema-evaluate"], "optimizer", Optimizer(ema_evaluate=False)),
        (["--callbacks", ""], "callbacks", ""),
        (["--optimizer.learning-rate", "0.01"], "optimizer", Optimizer(learning_rate=0.01)),
    ],
)
def test_an_override_changes_that_value_alone(overrides, name, value):
    expected = dataclasses.replace(presets.load_preset("fashion_mnist")(), **{name: value}).pin()
    assert expected == resolve_config("fashion_mnist", overrides)


def test_settings_that_only_another_version_has_are_ignored_with_a_warning(capsys):
    saved = resolve_config("mnist", ["--seed", "7"])
    value = saved.to_json() | {"log_to": "csv", "best": {"metric": "eval_loss"}}
    assert saved == TrainConfig.from_json(value | {"optimizer": value["optimizer"] | {"power": 2.0}})
    warned = capsys.readouterr().err.splitlines()
    assert ["--optimizer.power", "--log-to, --best"] == [line.split(" of a run's")[0][9:] for line in warned]
    assert saved == TrainConfig.from_json(saved.to_json())
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "typed", "nearest"),
    [
        *(("--epoch", "3", "--epochs"), ("--batch", "3", "--global-batch")),
        ("--learning-rate", "3", "--optimizer.learning-rate"),
        *(("--optimizer.name", "adamww", "adamw"), ("--optimizer.schedule", "cosin", "cosine")),
        *(("--optimizer.scaling", "linar", "linear"), ("--precision", "f16", "fp16"), ("--loop", "fitt", "fit")),
        *(("--dataset", "fashion-mnist", "fashion_mnist"), ("--model", "two_conv", "two_conv_cnn")),
        *(("--loss", "mean_square_error", "mean_squared_error"), ("--callbacks", "tutorials", "tutorial")),
    ],
)
def test_a_typo_is_refused_with_the_nearest_name(option, typed, nearest):
    message = refusal(option, typed)
    assert option in message
    assert nearest in message.replace(option, "", 1).replace(typed, "", 1)


FROM_1 = ("global-batch", "max-steps", "steps-per-loop", "log-every", "keep-checkpoints", "micro-batches")
FROM_0 = ("evaluate-every", "bitwise-elastic")
OF_OPTIMIZER = ("warmup-steps", "decay-steps", "weight-decay")
OUT_OF_RANGE = {
    **{f"--{name}": ["0"] for name in (*FROM_1, "optimizer.base-batch")},
    **{f"--{name}": ["-1"] for name in (*FROM_0, *(f"optimizer.{name}" for name in OF_OPTIMIZER))},
    "--seed": ["-1", "2147483648"],
    "--epochs": ["0", "nan", "inf"],
    "--optimizer.learning-rate": ["-0.1", "inf"],
    "--optimizer.momentum": ["1.5", "nan"],
    "--optimizer.clip-norm": ["-1", "nan"],
    "--optimizer.end-share": ["2"],
    "--optimizer.ema": ["1"],
    "--transformer.layers": ["0"],
    "--transformer.width": ["10"],
    "--transformer.context": ["100"],
    "--checkpoint-every": ["0", "-1", "30m", "abc", "-5s", "0s", "0.05s", "2.5", "30 s", "1e3s", "infs", "", "Auto"],
}


@pytest.mark.parametrize(
    ("option", "value"), [(name, each) for name, values in OUT_OF_RANGE.items() for each in values]
)
def test_a_value_out_of_range_is_refused_with_the_range(option, value):
    message = refusal(f"{option}={value}")
    assert message.startswith(f"{option} ")
    assert ": expected " in message


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("--epochs three", "^override .*'three'; see `invoke up -- --help`$"),
        ("--epochs", "^override .*--epochs"),
        ("500", "^override .*500"),
        ("--preset mnist", "^override .*--preset"),
        ("--bitwise-elastic 7", "--global-batch 196"),
        ("--bitwise-elastic 6 --no-deterministic", "--deterministic"),
        ("--optimizer.nesterov", "--optimizer.name adam"),
        ("--optimizer.name train.model.models:of --optimizer.weight-decay 0.1", "--optimizer.name train"),
        ("--optimizer.schedule cosine --callbacks tutorial", "--callbacks tutorial"),
        ("--source function", "--dataset fashion_mnist"),
        ("--num-outputs 3", "--source memory"),
    ],
)
def test_a_value_of_the_wrong_type_or_that_contradicts_another_is_refused_in_one_line(overrides, named):
    words = refusal(*overrides.split())
    assert re.search(named, words)
    assert words.isascii()


def test_a_stream_can_be_of_any_tfds_dataset():
    assert "cifar10" == resolve_config("mnist", ["--source", "stream", "--dataset", "cifar10"]).dataset
    assert "--dataset 'cifar10' is neither built in" in refusal("--dataset", "cifar10")


@pytest.fixture
def own(tmp_path, monkeypatch) -> Callable[[str], Path]:
    imports = "from train.config import Optimizer, TrainConfig\n"
    return lambda text: own_module.write(monkeypatch, tmp_path, "own_parts", f"{imports}{text}\n")


def test_a_preset_of_the_users_own_is_a_base_like_any_other(own):
    folder = own("def mine(): return TrainConfig(seed=7, global_batch=96, model='own_parts:net')\ndef net(s, k): pass")
    resolved = resolve_config("own_parts:mine", ["--seed", "8"])
    expected = TrainConfig(preset="own_parts:mine", seed=8, global_batch=96, model="own_parts:net")
    assert expected.pin() == resolved
    assert [folder] == resolved.code_dirs()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def mine(): return {'seed': 7}", "(dict)"),
        ("def mine(): return TrainConfig(sed=7)", "TypeError"),
        ("raise SystemExit('no')\ndef mine(): pass", "sys.exit('no')"),
        ("def mine(): return TrainConfig(seed=True)", "seed=True (bool)"),
        ("def mine(): return TrainConfig(model=print)", "model=<built-in function print>"),
        ("def mine(): return TrainConfig(optimizer='sgd')", "optimizer='sgd' (str)"),
        ("def mine(): return TrainConfig(optimizer=Optimizer(momentum=None))", "momentum=None"),
        ("def min(): pass", "did you mean 'min'?"),
    ],
)
def test_a_preset_that_makes_no_configuration_is_refused_in_one_line(text, named, own):
    own(text)
    words = refusal(preset="own_parts:mine")
    assert words.startswith("--preset 'own_parts:mine'")
    assert named in words


@pytest.mark.parametrize("option", ["--dataset", "--model", "--loss", "--callbacks"])
def test_a_part_of_the_users_own_is_checked_without_running_its_module(option, own):
    folder = own("raise RuntimeError('run')\ndef part(): pass")
    resolved = resolve_config("fashion_mnist", [option, "own_parts:part"])
    assert "own_parts:part" == getattr(resolved, option.removeprefix("--"))
    assert [folder] == resolved.code_dirs()
    assert "has no 'prt'; did you mean 'part'?" in refusal(option, "own_parts:prt")


def test_a_resumed_run_keeps_its_own_parts_and_checks_them_again(own):
    own("def mine(): return TrainConfig(model='own_parts:net')\ndef net(s, k): pass")
    saved = TrainConfig.from_json(resolve_config("own_parts:mine", []).to_json())
    assert dataclasses.replace(saved, epochs=6.0) == resolve_config("fashion_mnist", ["--epochs", "6"], saved)
    own("def net_2(s, k): pass")
    with pytest.raises(UsageError, match="^--model 'own_parts:net': .* has no 'net'; did you mean 'net_2'"):
        resolve_config("fashion_mnist", [], saved)


def test_mnist_differs_from_fashion_mnist_by_its_data_alone():
    """So the golden losses of one (`tests/golden/losses.py`) hold the numerics of both."""
    mnist, fashion = (presets.load_preset(name)() for name in ("mnist", "fashion_mnist"))
    assert dataclasses.replace(mnist, preset="fashion_mnist", dataset="fashion_mnist") == fashion


def test_a_deterministic_run_keeps_the_threads_that_it_began_with(monkeypatch):
    """The bits depend on them; on another machine it would have others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    begun = resolve_config("fashion_mnist", [])
    assert 6 == begun.threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert 6 == resolve_config("fashion_mnist", ["--epochs", "6"], begun).threads
    assert 64 == resolve_config("fashion_mnist", ["--threads", "0"], begun).threads
    assert 0 == resolve_config("fashion_mnist", ["--no-deterministic"]).threads
    assert 5 == resolve_config("fashion_mnist", [], cores=5).threads  # of a task on another machine


@pytest.mark.parametrize(
    ("requested", "model", "deterministic", "written"),
    [
        ("auto", "two_conv_cnn", True, "on"),
        ("auto", "mine:model", True, "auto"),  # decided by its operations, see train/startup/primitives.py
        ("auto", "mine:model", False, "auto"),
        ("auto", "resnet50", True, "off"),  # the gradient of its 1x1 convolutions with stride 2 varies
        ("off", "two_conv_cnn", True, "off"),
    ],
)
def test_onednn_is_on_for_models_whose_bits_repeat_with_it_and_off_in_fp16(requested, model, deterministic, written):
    config = TrainConfig(model=model, deterministic=deterministic)
    assert written == dataclasses.replace(config, onednn=requested).pin().onednn
    assert "off" == dataclasses.replace(config, precision="fp16").pin().onednn


def test_a_resumed_run_chooses_kernels_again_for_another_precision():
    run = TrainConfig(onednn="avx512", model="tests.support.small_training:new_model")
    for words, onednn in ([], "avx512"), (["--precision", "fp16"], "off"), (["--precision=bf16"], "off"):
        assert onednn == resolve_config("", words, run).onednn
    assert "on" == resolve_config("", ["--precision", "bf16", "--onednn", "on"], run).onednn


@pytest.mark.parametrize(("onednn", "precision"), [("avx2", "bf16"), ("avx2", "fp16"), ("avx512", "fp16")])
def test_instructions_without_kernels_of_a_precision_are_refused(onednn, precision):
    with pytest.raises(UsageError, match="--onednn"):
        TrainConfig(onednn=onednn, precision=precision).check()
    TrainConfig(onednn=onednn).check()


@pytest.mark.parametrize(
    ("values", "num_examples", "expected"),
    [
        ({"epochs": 3, "global_batch": 192}, 60000, 938),  # 937.5: the last step is begun
        ({"epochs": 0.001, "global_batch": 192}, 1000, 1),
        ({"epochs": 3, "global_batch": 192, "max_steps": 30}, 60000, 30),
        ({"epochs": 1, "global_batch": 100, "max_steps": 500}, 1000, 10),
    ],
)
def test_training_ends_after_its_epochs_or_its_steps(values, num_examples, expected):
    config = dataclasses.replace(presets.load_preset("fashion_mnist")(), **values)
    assert expected == config.total_steps(num_examples)
    assert 5 * values["global_batch"] / num_examples == config.epoch(5, num_examples)


@pytest.mark.parametrize(
    ("values", "largest"),
    [({}, 500), ({"global_batch": 2}, 8), ({"global_batch": 96, "micro_batches": 3, "bitwise_elastic": 8}, 16)],
)
def test_an_evaluation_of_a_small_batch_needs_little_memory(values, largest):
    assert largest == TrainConfig(**values).check().evaluation_batch


def test_printing_the_configuration_does_not_import_tensorflow():
    lines = (
        "import sys; from train.__main__ import main; main(['--print-config']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    value = json.loads(done.stdout)
    assert (presets.load_preset("fashion_mnist")().pin().to_json(), []) == (value["config"], value["code_dirs"])
    assert not {"tensorflow", "keras", "numpy"} & set(done.stderr.split())
