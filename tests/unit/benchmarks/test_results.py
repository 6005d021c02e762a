"""The figures of benchmarks: from measured times to the tables of the documents."""

import pytest

from benchmarks import documents as places
from benchmarks import exchange, figures, results
from benchmarks.figures import Goal
from cluster.system.errors import ClusterError
from tests.unit.benchmarks.sampled import COST, RECOVERY, START, TOGETHER, rows


def test_a_value_must_be_the_median_of_the_pairs_ratios_not_the_ratio_of_medians():
    assert 1.5 == TOGETHER.value
    assert {"ours": 3000.0, "hand-written loop": 2000.0} == TOGETHER.medians
    assert [1.5, 1.25, 2.0] == figures.ratios(*TOGETHER.variants.values())
    assert 5.5 == START.value  # plain: ours
    assert pytest.approx(0.03) == COST.value  # what is above one


@pytest.mark.parametrize(
    ("times", "cores", "expected"),
    [
        ({1: [3.0], 2: [4.0], 4: [8.0], 8: [16.0]}, 2, [1.0]),
        ({1: [1.0], 2: [4.0], 4: [12.0], 8: [16.0]}, 2, [1.5]),  # worst at 4
        ({1: [4.0, 1.0], 2: [4.0, 4.0]}, 1, [0.5, 2.0]),
        ({1: [3.0], 2: [4.0], 4: [6.4]}, 3, [1.2]),  # from the most tasks below
    ],
)
def test_growth_must_be_counted_from_a_task_a_core(times, cores, expected):
    assert pytest.approx(expected) == figures.growth(times, cores=cores)


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
