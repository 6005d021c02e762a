"""`invoke bench`: its arithmetic, what is kept of a measurement, and what is refused. Nothing here is timed."""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import importlib.util
import io
import json
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoke import Exit, MockContext, Result

import tasks
from benchmarks import command, contenders, exchange, figures, peers, plots, results, throughput
from benchmarks import images as weighing
from benchmarks.contenders import Contender, Setting, fastest
from benchmarks.figures import Figure, Goal
from benchmarks.runs import GLOBAL_BATCH, Bench
from cluster.checks import documents as places
from cluster.errors import (
    EXIT_FAILED,
    EXIT_PREREQUISITE,
    EXIT_USAGE,
    ClusterError,
    PrerequisiteError,
    RunFailed,
    UsageError,
)
from cluster.image import engine, images
from cluster.paths import ROOT

UNDER = {
    "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.5},
    "commit": "0123456789abcdef0123",
    "tensorflow": "2.21.0",
    "date": "2030-01-02",
}
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
SCALING = Figure(
    "scaling", "one core each", "examples/s", {"chief and 1 worker": [1900.0], "chief": [1000.0]}, [0.95], "times"
)
TASKS = Figure("tasks", "growth", "s", {"1 task": [4.0], "2 tasks": [5.0], "4 tasks": [9.0]}, [0.9], "times")
RECOVERY = Figure("recovery", "after a kill", "s", {"with standby": [2.4, 2.5], "without": [7.0, 7.4]}, [0.34])


def rows(*found: Figure, **changed: Any) -> list[results.Row]:
    return results.rows(found or (TOGETHER, START, COST), UNDER | changed)


# Arithmetic


def test_a_value_must_be_the_median_of_the_pairs_ratios_not_the_ratio_of_medians() -> None:
    assert 1.5 == TOGETHER.value
    assert {"ours": 3000.0, "hand-written loop": 2000.0} == TOGETHER.medians
    assert [1.5, 1.25, 2.0] == figures.ratios(*TOGETHER.variants.values())


def test_a_plain_value_must_be_ours_and_a_cost_what_is_above_one() -> None:
    assert 5.5 == START.value
    assert pytest.approx(0.03) == COST.value


def test_pairs_must_be_whole() -> None:
    with pytest.raises(ValueError, match="shorter"):
        figures.ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(1.25, at_least=True), 1.25, True),
        (Goal(1.25, at_least=True), 1.24, False),
        (Goal(6.0, at_least=False), 5.9, True),
        (Goal(6.0, at_least=False), 6.0, False),
        (Goal(6.0, at_least=False), float("nan"), False),
        (Goal(6.0, at_least=True), float("nan"), False),
    ],
)
def test_a_goal_must_be_met_on_its_own_side(goal: Goal, value: float, met: bool) -> None:
    assert met == goal.met(value)


def test_growth_must_be_counted_from_a_task_a_core() -> None:
    assert [1.0] == figures.growth({1: [3.0], 2: [4.0], 4: [8.0], 8: [16.0]}, cores=2)
    assert [1.5] == figures.growth({1: [1.0], 2: [4.0], 4: [12.0], 8: [16.0]}, cores=2)  # worst at 4
    assert [0.5, 2.0] == figures.growth({1: [4.0, 1.0], 2: [4.0, 4.0]}, cores=1)


def test_growth_on_more_cores_than_tasks_must_be_counted_from_the_most_tasks_below() -> None:
    assert [pytest.approx(1.2)] == figures.growth({1: [3.0], 2: [4.0], 4: [6.4]}, cores=3)


def test_a_step_must_be_timed_after_it_is_warm_and_at_the_same_steps_on_both_sides() -> None:
    ours = [{"step": step, "time": time} for step, time in [(25, 50.0), (50, 60.0), (75, 65.0), (100, 70.0)]]
    theirs = [{"step": 1, "time": 30.0}, *ours, {"step": 110, "time": 1000.0}]
    assert [0.2, 0.2] == figures.spans(ours) == figures.spans(theirs)
    assert 0.2 == figures.step_seconds(theirs)


def test_the_parts_of_a_step_must_add_up_to_it() -> None:
    warm = [{"computed": [0.0], "summed": [0.0]}] * 2
    chief = [*warm, {"computed": [1.0, 3.0], "summed": [2.0, 5.0]}, {"computed": [7.0, 9.0], "summed": [8.0, 11.0]}]
    worker = [*warm, {"computed": [1.0, 4.0], "summed": [2.0, 5.0]}, {"computed": [7.0, 10.0], "summed": [8.0, 11.0]}]
    found = exchange.parts([chief[1:], worker[1:]])
    assert exchange.Parts(own=1500.0, slower=500.0, exchange=1000.0, between=250.0) == found
    alone = exchange.parts([chief[1:]])
    assert (0.0, 2000.0) == (alone.slower, alone.exchange)


# Results


def test_a_row_must_hold_every_sample_and_the_conditions() -> None:
    assert {
        "name": "throughput-together",
        "title": "examples/s, chief and 1 worker, against the hand-written loop",
        "unit": "examples/s",
        "variants": [
            {"name": "ours", "samples": [3000.0, 2000.0, 4000.0], "median": 3000.0},
            {"name": "hand-written loop", "samples": [2000.0, 1600.0, 2000.0], "median": 2000.0},
        ],
        "ratios": [1.5, 1.25, 2.0],
        "ratio": 1.5,
        "form": "times",
        "value": 1.5,
        "goal": {"bound": 1.25, "at_least": True},
        "met": True,
        **UNDER,
    } == rows(TOGETHER)[0]
    without = rows(RECOVERY)[0]
    assert (None, None, 0.34) == (without["goal"], without["met"], without["ratio"])


def test_conditions_must_name_machine_commit_and_version() -> None:
    found = results.conditions()
    assert set(UNDER) == set(found)
    assert set(UNDER["hardware"]) == set(found["hardware"])
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0
    json.dumps(found, allow_nan=False)


def test_what_was_measured_again_must_replace_itself_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert [] == results.read(path)
    results.write(rows(), path)
    again = rows(START, date="2030-02-03")
    results.write(results.merge(results.read(path), [*again, *rows(RECOVERY)]), path)
    kept = results.read(path)
    assert ["throughput-together", "start", "telemetry", "recovery"] == [row["name"] for row in kept]
    assert ["2030-01-02", "2030-02-03"] == [row["date"] for row in kept[:2]]


def test_a_damaged_file_of_results_must_be_reported(tmp_path: Path) -> None:
    (path := tmp_path / "results.json").write_text("{")
    with pytest.raises(ClusterError, match=r"results\.json cannot be read"):
        results.read(path)


def test_the_table_must_report_figures_goals_and_what_they_were_measured_on() -> None:
    assert [
        "| figure | measured | against | result | goal | reached |",
        "|---|---|---|---|---|---|",
        "| examples/s, chief and 1 worker, against the hand-written loop | 3,000 examples/s (2,000 to 4,000) "
        "| hand-written loop: 2,000 examples/s (1,600 to 2,000) | 1.50 times (1.25 to 2.00) | at least 1.25 times "
        "| yes |",
        "| `up` to the first step | 5.50 s (5.00 to 9.00) | by hand: 6.50 s (6.00 to 7.00) | 5.50 s | under 6 s "
        "| yes |",
        "| cost of it all | 10.3 s for 400 steps | without: 10.0 s for 400 steps | 3.0% | under 2% | no |",
        "",
        "Medians, with the least and the largest sample. Some CPU, 2 cores, 23.5 GiB; TensorFlow 2.21.0; commit "
        "0123456789ab; 2030-01-02",
    ] == results.table(rows())


def test_the_spread_of_a_cost_must_be_that_of_its_ratios() -> None:
    several = dataclasses.replace(COST, variants={"with": [11.0, 9.0], "without": [10.0, 10.0]}, ratios=[1.1, 0.9])
    assert "| 0.0% (-10.0% to 10.0%) |" in results.table(rows(several))[2]


def test_the_terminal_must_report_what_was_reached() -> None:
    assert [
        "start: 5.50 s (goal under 6 s: reached)  `up` to the first step: up 5.50 s, by hand 6.50 s",
        "telemetry: 3.0% (goal under 2%: missed)  cost of it all: with 10.3 s for 400 steps, without 10.0 s for 400 "
        "steps",
        "recovery: 2.45 s (no goal)  after a kill: with standby 2.45 s, without 7.20 s",
    ] == results.lines(rows(START, COST, RECOVERY))


def test_what_was_measured_elsewhere_must_be_marked() -> None:
    lines = results.table([*rows(START), *rows(RECOVERY, date="2030-02-03", commit="0123456789abcdef-dirty")])
    assert "; commit 0123456789ab-dirty; " in lines[-1]
    assert lines[2].startswith("| `up` to the first step | ")
    assert lines[3].startswith("| after a kill (2) | 2.45 s (2.40 to 2.50) | without: 7.20 s (7.00 to 7.40) | 2.45 s |")
    assert lines[-1].startswith("(2) Some CPU")
    assert lines[-1].endswith("2030-02-03")


def test_the_documents_must_have_the_tables_of_the_results() -> None:
    for path, expected in results.tables(results.read()).items():
        assert expected == places.written(path, results.BEGIN), "`invoke bench --write` renews it"


def test_only_its_own_table_of_a_document_must_be_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.md"
    other = f"{places.begin('invoke other')}\nkept\n{places.END}\n"
    path.write_text(f"{other}between\n{results.BEGIN}\nold\n{places.END}\nafter\n")
    monkeypatch.setattr(results, "tables", lambda found: {path: results.table(found)})
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert ["one.md"] == results.renew(rows())
    assert results.table(rows()) == places.written(path, results.BEGIN)
    assert path.read_text().startswith(f"{other}between\n")
    assert path.read_text().endswith(f"{places.END}\nafter\n")


def test_an_image_s_weight_must_be_that_of_its_layers_compressed(tmp_path: Path) -> None:
    layers = {"plain/layer.tar": b"a" * 5_000_000, "blobs/packed": gzip.compress(b"b" * 1000)}
    parts = {"manifest.json": json.dumps([{"Config": "c", "Layers": list(layers)}]).encode(), **layers}
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        for name, content in parts.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    packed = len(gzip.compress(layers["plain/layer.tar"], 6)) + len(layers["blobs/packed"])
    assert pytest.approx(packed, abs=20) == weighing.compressed_bytes(tmp_path / "image.tar")


@pytest.mark.parametrize("fails", [False, True])
def test_images_must_be_built_under_names_of_their_own_that_go_again(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    there: set[str] = set()
    contexts: list[str] = []

    def call(self: Bench, words: list[str], environment: object = None, cwd: Path = Path()) -> str:
        assert (cwd / ".dockerignore").is_file()
        contexts.append((cwd / weighing.CHANGED).read_text())
        (tag,) = re.findall(r"--tag=(\S+)", words[-1])
        assert tag.startswith("tf-cluster/bench:")
        there.add(tag)
        if fails and len(contexts) == 3:
            raise RunFailed("the build broke")
        return ""

    def ask(*words: str, timeout_s: float = 0) -> tuple[int, str]:
        assert words[:2] == ("image", "rm")
        there.discard(words[2])
        return 0, ""

    monkeypatch.setattr(Bench, "call", call)
    monkeypatch.setattr(engine, "demand", lambda what: None)
    monkeypatch.setattr(engine, "ask", ask)
    monkeypatch.setattr(images, "default_base", lambda: images.Base("some-base"))
    bench = Bench(Path(), rounds=2, quick=True, log=lambda line: None)
    if fails:
        with pytest.raises(RunFailed, match="the build broke"):
            weighing.measure(bench)
    else:
        (figure,) = weighing.measure(bench)
        assert ("rebuild", 1) == (figure.name, len(figure.variants["both images"]))
        assert 4 == len(contexts)
    first, changed = contexts[0], contexts[2]
    assert first == contexts[1] == (ROOT / weighing.CHANGED).read_text()
    assert changed.startswith(first)
    assert changed != first
    assert set() == there


# Plots


def test_every_plot_must_be_drawn_of_what_was_measured_and_no_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    alone = Figure("throughput-alone", "alone", "examples/s", TOGETHER.variants, TOGETHER.ratios, "times")
    parts, tasks = ("start", "kill", "stop", "end", "share", "files"), {"16 tasks": [3.0], "8 tasks": [1.0]}
    gang = [Figure(f"gang-{part}", "16 tasks", "s", tasks) for part in parts]
    every = rows(START, TASKS, TOGETHER, alone, SCALING, RECOVERY, *gang)
    assert set(plots.PLOTS) == set(plots.draw(every, tmp_path / "all"))
    assert {"start"} == set(plots.draw(rows(START, COST), tmp_path / "one"))
    assert ["start.png"] == [path.name for path in (tmp_path / "one").iterdir()]
    for path in (tmp_path / "all").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


# The command


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
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
    with pytest.raises(Exit) as ended:
        tasks.ns["bench"](MockContext(run=Result(), repeat=True), runtime="local", **options)
    return ended.value.code, ended.value.message or ""


def test_every_benchmark_must_be_there() -> None:
    for name in (*command.NAMES, *command.ON_REQUEST):
        assert callable(importlib.import_module(f"benchmarks.{name}").measure)


def test_an_unknown_benchmark_must_be_refused_with_the_nearest(measured: list[str]) -> None:
    assert (EXIT_USAGE, "error: --only 'throughptu' is no benchmark; did you mean 'throughput'?") == invoked(
        only="start,throughptu"
    )
    assert [] == measured


def test_all_must_be_chosen_where_none_is_named_and_none_twice() -> None:
    assert list(command.NAMES) == command.chosen("")
    assert ["telemetry", "elastic"] == command.chosen("telemetry,elastic,telemetry")
    with pytest.raises(UsageError, match="known: "):
        command.chosen("xyz")


def test_a_missing_matplotlib_must_be_reported_in_one_line(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, message = invoked(only="start")
    assert EXIT_PREREQUISITE == code
    assert message.startswith("error: matplotlib, which draws the plots, is not installed here; run `make bench`")
    assert "\n" not in message
    assert [] == measured


def test_what_is_found_must_be_kept_and_a_missed_goal_is_exit_code_1(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (0, "") == invoked(only="start", json=True)
    printed = json.loads(capsys.readouterr().out)["figures"]
    assert ["start"] == [row["name"] for row in printed] == [row["name"] for row in results.read()]
    assert EXIT_FAILED == invoked(only="telemetry")[0]
    assert ["start", "telemetry"] == [row["name"] for row in results.read()]
    assert ["start", "plots", "telemetry", "plots"] == measured


def test_a_benchmark_that_fails_must_not_cost_the_others(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_quick_try_must_keep_nothing(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "renew", lambda found: pytest.fail("it renews the table"))
    assert 0 == invoked(only="telemetry", quick=True, write=True)[0]
    assert [] == results.read()


def test_without_an_engine_what_needs_one_must_be_left_out_unless_it_is_named(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    invoked(quick=True)
    assert [name for name in command.NAMES if name != "images"] == measured[:-1]
    assert "images: left out" in capsys.readouterr().err
    monkeypatch.setattr(engine, "probe", lambda: engine.Answer(False, "no Docker Engine answers (none)"))
    with pytest.raises(PrerequisiteError, match="benchmark images: no Docker Engine answers"):
        weighing.measure(Bench(Path()))


def test_steps_and_rounds_must_be_few_in_a_quick_try() -> None:
    quick, whole = Bench(Path(), quick=True), Bench(Path(), rounds=3)
    assert (75, 150) == (quick.steps(150), whole.steps(150))
    assert ([0], [0, 1, 2]) == (list(quick.turns()), list(whole.turns()))


def test_only_a_peer_without_an_environment_must_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_environment_that_cannot_be_made_must_be_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers.subprocess, "run", lambda command, **options: SimpleNamespace(returncode=1))
    monkeypatch.delenv("TORCH_PYTHON", raising=False)
    with pytest.raises(PrerequisiteError, match="set TORCH_PYTHON to a Python with torch"):
        peers.prepare(lambda line: None)
    assert not peers.PEERS[0].python


# Settings


def contender(rates: dict[str, list[float]]) -> Contender:
    """Return a program that runs as fast as these say, one run of each setting after the other."""

    def run(_bench: Bench, _tasks: int, _steps: int, setting: Setting) -> list[dict[str, Any]]:
        seconds = GLOBAL_BATCH / rates[setting.name].pop(0)
        return [{"step": step, "time": step * seconds} for step in (25, 50, 75)]

    return Contender("other", lambda tasks: [Setting(name) for name in rates], run)


def test_the_setting_of_the_fastest_run_must_be_measured() -> None:
    rates = {"plain": [100.0], "tuned": [300.0, 90.0], "other": [200.0, 250.0]}
    setting, tried = fastest(Bench(Path(), log=lambda line: None), contender(rates), tasks=2)
    assert "tuned" == setting.name
    assert {"plain": [100.0], "tuned": [300.0, 90.0], "other": [200.0, 250.0]} == {
        name: [pytest.approx(each) for each in samples] for name, samples in tried.items()
    }


def test_a_program_that_fails_must_be_tried_again_once() -> None:
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


def test_ours_must_stand_against_the_fastest_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = contender({"as is": [10.0] * 9}), contender({"one": [30.0] * 9, "two": [50.0] * 9})
    steps = [{"step": step, "time": step * GLOBAL_BATCH / 100.0} for step in (25, 50, 75)]
    monkeypatch.setattr(Bench, "train", lambda *words, **options: steps)
    others = [dataclasses.replace(slow, title="slow"), dataclasses.replace(fast, title="fast")]
    bench = Bench(Path(), rounds=2, log=lambda line: None)
    figure = throughput._compared(bench, "throughput-alone", "chief alone", 1, others)
    assert ["ours", "fast: two", "slow: as is"] == list(figure.variants)
    assert [2.0] * 2 * throughput.TIMES == pytest.approx(figure.ratios)
    assert {"fast: one", "fast: two", "slow: as is"} == set(figure.to_json()["tried"])


def test_every_setting_must_be_tried_on_a_task_s_share_of_the_cores_and_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "cores", lambda: 4)
    assert [2, 4] == contenders.threads(2)
    assert [4] == contenders.threads(1)
    assert [1, 4] == contenders.threads(8)
    for settings in (contenders.LOOP.settings, contenders.FIT.settings, *(peer.settings for peer in peers.PEERS)):
        found = settings(2)
        assert () == found[0].words
        assert {"--threads=2", "--threads=4"} <= {word for setting in found for word in setting.words}
        assert len(found) == len({setting.name for setting in found})
