"""The programs that a benchmark compares with: their environments, and the setting that suits each best."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers, throughput
from benchmarks.contenders import Contender, Setting, fastest
from benchmarks.runs import GLOBAL_BATCH, Bench
from cluster.system.errors import (
    RunFailed,
)


def test_only_a_peer_without_an_environment_must_get_one(tmp_path, monkeypatch):
    made: list[str] = []
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "_make", lambda peer: made.append(peer.module))
    monkeypatch.setattr(Bench, "call", lambda *words: "2.13.0\n")
    monkeypatch.setenv("TORCH_PYTHON", "/some/python")
    monkeypatch.delenv("RAY_PYTHON", raising=False)
    peers.prepare(lambda line: None)
    assert ["ray"] == made
    assert ["torchrun DDP 2.13.0"] == [each.title for each in peers.chosen(Bench(Path(), peers=True))]
    assert [] == peers.chosen(Bench(Path()))
    monkeypatch.setenv("TORCH_PYTHON", "")
    monkeypatch.setenv("RAY_PYTHON", "")
    peers.prepare(made.append)
    assert ["ray"] == made
    assert [] == peers.chosen(Bench(Path(), peers=True))


# Settings


def contender(rates: dict[str, list[float]]) -> Contender:
    """Return a program that runs as fast as these say, one run of each setting after the other."""

    def run(_bench: Bench, _tasks: int, _steps: int, setting: Setting) -> list[dict[str, Any]]:
        seconds = GLOBAL_BATCH / rates[setting.name].pop(0)
        return [{"step": step, "time": step * seconds} for step in (25, 50, 75)]

    return Contender("other", lambda tasks: [Setting(name) for name in rates], run)


def test_the_setting_of_the_fastest_run_must_be_measured():
    rates = {"plain": [100.0], "tuned": [300.0, 90.0], "other": [200.0, 250.0]}
    setting, tried = fastest(Bench(Path(), log=lambda line: None), contender(rates), tasks=2)
    assert "tuned" == setting.name
    assert {"plain": [100.0], "tuned": [300.0, 90.0], "other": [200.0, 250.0]} == {
        name: [pytest.approx(each) for each in samples] for name, samples in tried.items()
    }


def test_a_program_that_fails_must_be_tried_again_once():
    outcomes: list[Any] = [RunFailed("address in use"), [{"step": step, "time": step} for step in (25, 50, 75)]]

    def run(*_words: Any) -> list[dict[str, Any]]:
        if isinstance(outcome := outcomes.pop(0), RunFailed):
            raise outcome
        return list(outcome)

    flaky, bench = Contender("flaky", lambda tasks: [], run), Bench(Path(), log=lambda line: None)
    assert GLOBAL_BATCH == flaky.rate(bench, 2, 75, Setting("as is"))
    outcomes += [RunFailed("address in use")] * 2
    with pytest.raises(RunFailed):
        flaky.rate(bench, 2, 75, Setting("as is"))


def test_ours_must_stand_against_the_fastest_of_the_others(monkeypatch):
    slow, fast = contender({"as is": [10.0] * 9}), contender({"one": [30.0] * 9, "two": [50.0] * 9})
    steps = [{"step": step, "time": step * GLOBAL_BATCH / 100.0} for step in (25, 50, 75)]
    monkeypatch.setattr(Bench, "train", lambda *words, **options: steps)
    others = [dataclasses.replace(slow, title="slow"), dataclasses.replace(fast, title="fast")]
    bench = Bench(Path(), rounds=2, log=lambda line: None)
    figure = throughput._compared(bench, "throughput-alone", "chief alone", 1, others)
    assert ["ours", "fast: two", "slow: as is"] == list(figure.variants)
    assert [2.0] * 2 * throughput.TIMES == pytest.approx(figure.ratios)
    assert {"fast: one", "fast: two", "slow: as is"} == set(figure.to_json()["tried"])


ROOT = Path(__file__).resolve().parents[3]
RAY = """
import json, os, sys
def init(**_):
    names = ("RAY_USAGE_STATS_ENABLED", "RAY_USAGE_STATS_CONFIG_PATH")
    enabled, path = (os.environ.get(name) for name in names)
    print(json.dumps([enabled, json.load(open(path))]))
    sys.exit(0)
"""


def test_ray_sends_no_usage_report(tmp_path):
    (tmp_path / "ray" / "train").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text(RAY)
    (tmp_path / "ray" / "train" / "__init__.py").write_text("RunConfig = ScalingConfig = None\n")
    (tmp_path / "ray" / "train" / "tensorflow.py").write_text("TensorflowTrainer = None\n")
    words = ["--arrays=/nowhere", "--steps=1", "--tasks=1"]
    requested = {"PYTHONPATH": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.baselines.ray_train", *words],
        cwd=ROOT, env=os.environ | requested, capture_output=True, text=True,
    )  # fmt: skip
    assert ["0", {"usage_stats": False}] == json.loads(done.stdout or "null"), done.stderr
