"""The tour: every command is shown before it runs, fits the screen, exists, and is in the document with its output."""

import sys

import pytest
from invoke import Exit, MockContext

import tasks
from cluster.host.cli.tasks import tour as task
from cluster.host.control import tour
from cluster.host.control.tour import STEPS, Ran, Step


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The commands that were run, in a tour where each succeeds."""
    commands: list[str] = []

    def run(step: Step, say: object) -> Ran:
        commands.append(step.command)
        return Ran(step, 0, ["its output"])

    monkeypatch.setattr(tour, "run", run)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    return commands


def test_each_command_is_explained_and_shown_in_80_columns(ran, capsys):
    tasks.ns["tour"](MockContext())
    lines = capsys.readouterr().out.splitlines()
    assert [step.command for step in STEPS] == ran
    shown = [line for line in lines if line.startswith("$ ")]
    assert [f"$ {command}" for command in ran] == shown
    assert not [line for line in lines if len(line) > tour.WIDTH and not line.startswith("$ ")]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("there", ["a run", "a file"])
def test_a_tour_leaves_what_has_its_run_s_name(ran, make_run, tmp_path, there):
    if there == "a run":
        make_run(tour.RUN)
    else:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / tour.RUN).touch()
    tasks.ns["tour"](MockContext())
    other = f"{tour.RUN}-2"
    assert [step.command.replace(tour.RUN, other) for step in STEPS] == ran
    assert not [command for command in ran if "--fresh" in command]


def test_a_user_can_stop_before_any_command(ran, monkeypatch, capsys):
    answers = iter(["", "q"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    tasks.ns["tour"](MockContext())
    assert [STEPS[0].command] == ran


def test_a_reader_who_takes_long_does_not_miss_the_training(ran, monkeypatch, capsys):
    asked: list[int] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(len(ran)) or "")
    tasks.ns["tour"](MockContext())
    kill = next(number for number, step in enumerate(STEPS) if step.words[0] == "chaos")
    start = next(number for number, step in enumerate(STEPS) if step.words[0] == "up")
    assert start in asked
    assert not set(range(start + 1, kill + 1)) & set(asked)


def test_a_command_that_fails_ends_the_tour_with_its_code(monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(tour, "run", lambda step, say: Ran(step, 3, []))
    with pytest.raises(Exit) as ended:
        tasks.ns["tour"](MockContext())
    assert 3 == ended.value.code


def test_an_interrupted_tour_ends_its_run(monkeypatch):
    def interrupt(step: Step, say: object) -> Ran:
        raise KeyboardInterrupt

    called: list[list[str]] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(tour, "run", interrupt)
    monkeypatch.setattr(task.subprocess, "run", lambda command, **more: called.append(command))
    with pytest.raises(Exit) as ended:
        tasks.ns["tour"](MockContext())
    assert 130 == ended.value.code
    assert [["down", tour.RUN]] == [command[-2:] for command in called]


def test_every_command_is_a_task_and_needs_no_engine():
    assert {step.words[0] for step in STEPS} <= set(tasks.ns.task_names)
    (start,) = (step.words for step in STEPS if step.words[0] == "up")
    assert "local" == start[start.index("--runtime") + 1]


def test_a_command_s_output_and_code_are_kept():
    said: list[str] = []
    step = Step("", "", ("explain", "--workers", "0", "--strategy", "none"))
    result = tour.run(step, said.append)
    assert (2, said) == (result.code, result.output)
    assert said[-1].startswith("error: ")


def test_the_document_has_every_step_with_what_it_printed():
    written = task.PAGE.read_text()
    for number, step in enumerate(STEPS, 1):
        _, found, rest = written.partition(f"## {number}. {step.title}\n")
        assert found, step.title
        assert f"$ {step.command}\n" in rest.partition("\n## ")[0]
        output = rest.partition(f"$ {step.command}\n")[2].partition("```")[0]
        assert output.strip(), step.title
    assert "identical: " in written
    assert "noticed after" in written
