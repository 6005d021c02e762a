"""The program that is written with Ray reports nothing to anybody; a stand-in for Ray says what it is started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
