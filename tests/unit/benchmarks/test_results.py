"""The figures of benchmarks: from measured times to the tables of the documents."""

import json

import pytest

from benchmarks import exchange, figures, pipeline, plots, results
from benchmarks.figures import Figure, Goal
from cluster.host.checks import documents as places
from cluster.system.errors import (
    ClusterError,
)
from tests.unit.benchmarks.sampled import COST, RECOVERY, SCALING, START, TASKS, TOGETHER, UNDER, rows
from train.pipeline import schedule

# Arithmetic


def test_a_value_must_be_the_median_of_the_pairs_ratios_not_the_ratio_of_medians():
    assert 1.5 == TOGETHER.value
    assert {"ours": 3000.0, "hand-written loop": 2000.0} == TOGETHER.medians
    assert [1.5, 1.25, 2.0] == figures.ratios(*TOGETHER.variants.values())


def test_a_plain_value_must_be_ours_and_a_cost_what_is_above_one():
    assert 5.5 == START.value
    assert pytest.approx(0.03) == COST.value


def test_pairs_must_be_whole():
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
def test_a_goal_must_be_met_on_its_own_side(goal, value, met):
    assert met == goal.met(value)


def test_growth_must_be_counted_from_a_task_a_core():
    assert [1.0] == figures.growth({1: [3.0], 2: [4.0], 4: [8.0], 8: [16.0]}, cores=2)
    assert [1.5] == figures.growth({1: [1.0], 2: [4.0], 4: [12.0], 8: [16.0]}, cores=2)  # worst at 4
    assert [0.5, 2.0] == figures.growth({1: [4.0, 1.0], 2: [4.0, 4.0]}, cores=1)


def test_growth_on_more_cores_than_tasks_must_be_counted_from_the_most_tasks_below():
    assert [pytest.approx(1.2)] == figures.growth({1: [3.0], 2: [4.0], 4: [6.4]}, cores=3)


def test_a_step_must_be_timed_after_it_is_warm_and_at_the_same_steps_on_both_sides():
    ours = [{"step": step, "time": time} for step, time in [(25, 50.0), (50, 60.0), (75, 65.0), (100, 70.0)]]
    theirs = [{"step": 1, "time": 30.0}, *ours, {"step": 110, "time": 1000.0}]
    assert [0.2, 0.2] == figures.spans(ours) == figures.spans(theirs)
    assert 0.2 == figures.step_seconds(theirs)


def test_the_parts_of_a_step_must_add_up_to_it():
    warm = [{"computed": [0.0], "summed": [0.0]}] * 2
    chief = [*warm, {"computed": [1.0, 3.0], "summed": [2.0, 5.0]}, {"computed": [7.0, 9.0], "summed": [8.0, 11.0]}]
    worker = [*warm, {"computed": [1.0, 4.0], "summed": [2.0, 5.0]}, {"computed": [7.0, 10.0], "summed": [8.0, 11.0]}]
    found = exchange.parts([chief[1:], worker[1:]])
    assert exchange.Parts(own=1500.0, slower=500.0, exchange=1000.0, between=250.0) == found
    alone = exchange.parts([chief[1:]])
    assert (0.0, 2000.0) == (alone.slower, alone.exchange)


# Results


def test_a_row_must_hold_every_sample_and_the_conditions():
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


def test_conditions_must_name_machine_commit_and_version():
    found = results.conditions()
    assert set(UNDER) == set(found)
    assert set(UNDER["hardware"]) == set(found["hardware"])
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0
    json.dumps(found, allow_nan=False)


def test_what_was_measured_again_must_replace_itself_and_nothing_else(tmp_path):
    path = tmp_path / "results.json"
    assert [] == results.read(path)
    results.write(rows(), path)
    again = rows(START, date="2030-02-03")
    results.write(results.merge(results.read(path), [*again, *rows(RECOVERY)]), path)
    kept = results.read(path)
    assert ["throughput-together", "start", "telemetry", "recovery"] == [row["name"] for row in kept]
    assert ["2030-01-02", "2030-02-03"] == [row["date"] for row in kept[:2]]


def test_a_damaged_file_of_results_must_be_reported(tmp_path):
    (path := tmp_path / "results.json").write_text("{")
    with pytest.raises(ClusterError, match=r"results\.json cannot be read"):
        results.read(path)


def test_the_table_must_report_figures_goals_and_what_they_were_measured_on():
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


def test_what_was_measured_elsewhere_must_be_marked():
    lines = results.table([*rows(START), *rows(RECOVERY, date="2030-02-03", commit="0123456789abcdef-dirty")])
    assert "; commit 0123456789ab-dirty; " in lines[-1]
    assert lines[2].startswith("| `up` to the first step | ")
    assert lines[3].startswith("| after a kill (2) | 2.45 s (2.40 to 2.50) | without: 7.20 s (7.00 to 7.40) | 2.45 s |")
    assert lines[-1].startswith("(2) Some CPU")
    assert lines[-1].endswith("2030-02-03")


def test_the_documents_must_have_the_tables_of_the_results():
    for path, expected in results.tables(results.read()).items():
        assert expected == places.written(path, results.BEGIN), "`invoke bench --write` renews it"


def test_only_its_own_table_of_a_document_must_be_renewed(tmp_path, monkeypatch):
    path = tmp_path / "one.md"
    other = f"{places.begin('invoke other')}\nkept\n{places.END}\n"
    path.write_text(f"{other}between\n{results.BEGIN}\nold\n{places.END}\nafter\n")
    monkeypatch.setattr(results, "tables", lambda found: {path: results.table(found)})
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert ["one.md"] == results.renew(rows())
    assert results.table(rows()) == places.written(path, results.BEGIN)
    assert path.read_text().startswith(f"{other}between\n")
    assert path.read_text().endswith(f"{places.END}\nafter\n")


# Plots


def test_every_plot_must_be_drawn_of_what_was_measured_and_no_other(tmp_path):
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


def test_more_stages_are_simulated_from_the_times_of_two():
    spans = {m: schedule.simulate(schedule.build("1f1b", 2, m), [1.0, 1.0], [2.0, 2.0]) for m in (1, 4, 8, 32)}
    figures = {figure.name: figure for figure in pipeline._simulated(spans)}
    assert {f"pipeline-k{stages}-m{m}-simulated" for stages in (4, 8) for m in (1, 4, 32)} == set(figures)
    for stages in (4, 8):
        for m in (1, 4, 32):
            figure = figures[f"pipeline-k{stages}-m{m}-simulated"]
            assert figure.value == pytest.approx(stages * m / (m + stages - 1))
            assert "simulated" in figure.title
            assert f"{pipeline.PAPER[stages][m]:g}" in figure.title


def test_more_micro_batches_are_compared_with_one_and_with_one_task():
    rates = {(2, 1): [10.0], (2, 4): [16.0], (2, 32): [18.0], (1, 4): [10.5], (1, 32): [10.0]}
    chosen = {m: pipeline.MICRO_BATCHES[m] for m in (1, 4, 32)}
    figures = {figure.name: figure for figure in pipeline._measured(rates, chosen)}
    assert (1.6, True) == (figures["pipeline-m4"].value, figures["pipeline-m4"].met)
    assert (1.8, True) == (figures["pipeline-k2-m32"].value, figures["pipeline-k2-m32"].met)
    assert figures["pipeline-k2-m4"].met is None
