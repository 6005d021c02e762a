"""What the benchmark of a pipeline makes of the times that it measured."""

import pytest

from benchmarks import pipeline
from train.pipeline import schedule


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
