"""The figures of benchmarks: from measured times to the tables of the documents."""

import dataclasses
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, documents, figures, results, throughput
from benchmarks.contenders import Contender, Setting
from benchmarks.figures import Figure, Goal
from benchmarks.runs import GLOBAL_BATCH, Bench
from cluster.system.errors import EXIT_FAILED, EXIT_PREREQUISITE, EXIT_USAGE
from tests.support.command_line import refusal

TOGETHER = Figure(
    "throughput-together",
    "examples/s, chief and 1 worker, against the hand-written loop",
    "examples/s",
    {"ours": [3000.0, 2000.0, 4000.0], "hand-written loop": [2000.0, 1600.0, 2000.0]},
    [1.5, 1.25, 2.0],
    "times",
    Goal(1.25, at_least=True),
)
START = Figure(
    "start", "`up` to the first step", "s", {"up": [5.0, 9.0, 5.5], "by hand": [6.0, 6.5, 7.0]}, (), "plain",
    Goal(6.0, at_least=False),
)  # fmt: skip
COST = Figure(
    "telemetry", "cost of it all", "s for 400 steps", {"with": [10.3], "without": [10.0]}, [1.03], "cost",
    Goal(0.02, at_least=False),
)  # fmt: skip


def test_a_value_must_be_the_median_of_the_pairs_ratios_not_the_ratio_of_medians():
    assert 1.5 == TOGETHER.value
    assert {"ours": 3000.0, "hand-written loop": 2000.0} == TOGETHER.medians
    assert [1.5, 1.25, 2.0] == figures.ratios(*TOGETHER.variants.values())
    assert 5.5 == START.value  # plain: ours
    assert pytest.approx(0.03) == COST.value  # what is above one
    assert [True, True, False] == [TOGETHER.met, START.met, COST.met]


def test_a_step_must_be_timed_after_it_is_warm_and_at_the_same_steps_on_both_sides():
    ours = [{"step": step, "time": time} for step, time in [(25, 50.0), (50, 60.0), (75, 65.0), (100, 70.0)]]
    theirs = [{"step": 1, "time": 30.0}, *ours, {"step": 110, "time": 1000.0}]
    assert [0.2, 0.2] == figures.spans(ours) == figures.spans(theirs)
    assert 0.2 == figures.step_seconds(theirs)


def test_the_documents_must_have_the_tables_of_the_results():
    for path, expected in results.tables(results.read()).items():
        assert expected == documents.written(path, results.BEGIN), "`invoke bench --write` renews it"


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
    invoked(only="start")  # which replaces what it found before, and nothing else
    assert ["start", "telemetry"] == [row["name"] for row in results.read()]
    assert ["start", "plots", "telemetry", "plots", "start", "plots"] == measured


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
