"""`invoke bench`: what is chosen, kept, refused and compared with, and the weight of images. Nothing is timed."""

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, results, throughput
from benchmarks import images as weighing
from benchmarks.contenders import Contender, Setting
from benchmarks.figures import Figure
from benchmarks.runs import GLOBAL_BATCH, Bench
from cluster.host.image import engine
from cluster.system.errors import EXIT_FAILED, EXIT_PREREQUISITE, EXIT_USAGE, PrerequisiteError, RunFailed
from cluster.system.paths import ROOT
from tests.support.command_line import refusal
from tests.unit.benchmarks.sampled import COST, SCALING, START, rows


@pytest.fixture
def measured(tmp_path, monkeypatch) -> list[str]:
    """Benchmarks that measure nothing and find made-up figures; what was asked of them."""
    requested: list[str] = []

    def measure(name: str, runs: Bench) -> list[Figure]:
        requested.append(name)
        return {"start": [START], "telemetry": [COST]}.get(name, [])

    monkeypatch.setattr(command, "_measure", measure)
    monkeypatch.setattr(command, "_draw", lambda found, quick, log: requested.append("plots"))
    monkeypatch.setattr(Bench, "invoke", lambda *words, **environment: None)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(results.read, "__defaults__", (tmp_path / "results.json",))
    monkeypatch.setattr(results.write, "__defaults__", (tmp_path / "results.json",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return requested


def invoked(**options: Any) -> tuple[int, str]:
    """Run the task; return its exit code and its message."""
    return refusal("bench", runtime="local", **options)


def test_a_benchmark_is_one_of_the_known(measured, monkeypatch):
    assert list(command.NAMES) == command.chosen("")
    assert ["telemetry", "elastic"] == command.chosen("telemetry,elastic,telemetry")
    for name in (*command.NAMES, *command.ON_REQUEST):
        assert callable(importlib.import_module(f"benchmarks.{name}").measure)
    code, message = invoked(only="start,throughptu")
    assert (EXIT_USAGE, True) == (code, "'throughput'" in message)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, message = invoked(only="start")
    assert (EXIT_PREREQUISITE, True) == (code, "matplotlib" in message)
    assert [] == measured


def test_what_is_found_must_be_kept_and_a_missed_goal_is_exit_code_1(measured, capsys):
    assert (0, "") == invoked(only="start", json=True)
    printed = json.loads(capsys.readouterr().out)["figures"]
    assert ["start"] == [row["name"] for row in printed] == [row["name"] for row in results.read()]
    assert EXIT_FAILED == invoked(only="telemetry")[0]
    assert ["start", "telemetry"] == [row["name"] for row in results.read()]
    assert ["start", "plots", "telemetry", "plots"] == measured


def test_a_benchmark_that_fails_must_not_cost_the_others(measured, monkeypatch, capsys):
    measure = command._measure

    def fails(name: str, runs: Bench) -> list[Figure]:
        if name == "scaling":
            raise RunFailed("no port is free")
        return measure(name, runs)

    monkeypatch.setattr(command, "_measure", fails)
    earlier = rows(dataclasses.replace(SCALING, name="scaling"), commit="earlier")
    results.write(earlier)
    assert EXIT_FAILED == invoked(only="scaling,start")[0]
    assert {"scaling": "earlier"} == {row["name"]: row["commit"] for row in results.read() if row["name"] != "start"}
    assert ["scaling", "start"] == [row["name"] for row in results.read()]
    assert "scaling failed: no port is free" in capsys.readouterr().err
    assert EXIT_FAILED == invoked(only="scaling,start", quick=True)[0]


def test_a_quick_try_must_keep_nothing(measured, monkeypatch):
    monkeypatch.setattr(results, "renew", lambda found: pytest.fail("it renews the table"))
    assert 0 == invoked(only="telemetry", quick=True, write=True)[0]
    assert [] == results.read()


def test_without_an_engine_what_needs_one_must_be_left_out_unless_it_is_named(measured, monkeypatch, capsys):
    invoked(quick=True)
    assert [name for name in command.NAMES if name != "images"] == measured[:-1]
    assert "images: left out" in capsys.readouterr().err
    monkeypatch.setattr(engine, "probe", lambda: engine.Availability(False, "no Docker Engine answers (none)"))
    with pytest.raises(PrerequisiteError, match="benchmark images: no Docker Engine answers"):
        weighing.measure(Bench(Path()))


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
