"""The programs that a benchmark compares with: their environments, and the setting that suits each best."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import throughput
from benchmarks.contenders import Contender, Setting
from benchmarks.runs import GLOBAL_BATCH, Bench

# Settings


def contender(rates: dict[str, list[float]]) -> Contender:
    """Return a program that runs as fast as these say, one run of each setting after the other."""

    def run(_bench: Bench, _tasks: int, _steps: int, setting: Setting) -> list[dict[str, Any]]:
        seconds = GLOBAL_BATCH / rates[setting.name].pop(0)
        return [{"step": step, "time": step * seconds} for step in (25, 50, 75)]

    return Contender("other", lambda tasks: [Setting(name) for name in rates], run)


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
