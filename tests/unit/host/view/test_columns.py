"""Columns, lines and plans that fit a terminal."""

import pytest

from cluster.host.view.columns import chosen_columns, columns
from cluster.system.terminal import WIDE, fit, terminal_width

WORDS = " ".join(["word"] * 30)


def test_a_line_is_wrapped_below_its_text_and_not_below_its_label():
    assert ["run folder   runs/one"] == fit(["run folder   runs/one"], 40)
    first, *rest = fit([f"weights      {WORDS}"], 40)
    assert first.startswith("weights      word")
    assert {13} == {len(line) - len(line.lstrip()) for line in rest}
    assert max(map(len, [first, *rest])) <= 40


def test_paths_and_commands_stay_whole():
    path, command = f"/home/{'x' * 90}", "`invoke up --resume fashion_mnist`"
    assert f"{path}:" in [line.strip() for line in fit([f"error: {path}: it is full; free space"], 40)]
    assert any(command in line for line in fit([f"error: the run has ended, so that {command} continues"], 40))


def test_the_last_column_is_wrapped():
    head, *rest = columns([("TASK", "WHAT"), ("chief", WORDS)], width=50)
    assert max(map(len, rest)) <= 50
    assert {head.index("WHAT")} == {line.index("word") for line in rest}


def test_a_last_column_without_room_is_shown_below_its_row():
    lines = columns([("STRATEGY", "DETAIL"), ("x" * 50, WORDS), ("y", "")], width=70)
    assert ["STRATEGY", "    DETAIL", "x" * 50] == lines[:3]
    assert "y" == lines[-1]
    assert max(map(len, lines)) <= 70


def test_columns_that_do_not_fit_are_left_out():
    names, rows = ("RUN", "STEPS", "NOTE"), [("one", 10, "x" * 10)]
    table = {width: chosen_columns(names, rows, right=["STEPS"], spare=["NOTE"], width=width) for width in (10, 40)}
    assert ["RUN  STEPS", "one     10"] == table[10]
    assert list(names) == table[40][0].split()


@pytest.mark.parametrize("columns", ["", "0", "x"])
def test_without_a_terminal_lines_are_not_wrapped(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert WIDE == terminal_width()
    monkeypatch.setenv("COLUMNS", "72")
    assert 72 == terminal_width()
