"""The tour: every command is shown before it runs, fits the screen, exists, and is in the document with its output."""

import os
import pty
import sys

import pytest
from invoke import MockContext

import tasks
from cluster.host.cli.command_line import ask_user
from cluster.host.cli.tasks import tour
from cluster.host.cli.tasks.tour import STEPS
from cluster.system.files import ROOT
from tests.support.command_line import refusal


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The commands that were run, in a tour where each succeeds."""
    commands: list[str] = []
    monkeypatch.setattr(tour, "run_command", lambda command: commands.append(command) or 0)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    return commands


def test_each_command_is_explained_and_shown_in_80_columns(ran, capsys):
    tasks.ns["tour"](MockContext())
    printed = capsys.readouterr().out
    assert [step.command() for step in STEPS] == ran
    assert {step.line.split()[0] for step in STEPS} <= set(tasks.ns.task_names)
    shown = [line for line in printed.splitlines() if line.startswith("$ ")]
    assert [f"$ {command}" for command in ran] == shown
    assert not [line for line in printed.splitlines() if len(line) > tour.WIDTH and not line.startswith("$ ")]


def test_a_tour_leaves_what_has_its_run_s_name(ran, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / tour.RUN).touch()
    tasks.ns["tour"](MockContext())
    assert [step.command(f"{tour.RUN}-2") for step in STEPS] == ran
    assert not [command for command in ran if "--fresh" in command]


def test_a_user_can_stop_before_any_command(ran, monkeypatch):
    answers = iter(["", "q"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    tasks.ns["tour"](MockContext())
    assert [STEPS[0].command()] == ran


def test_what_was_typed_before_a_question_is_not_an_answer(monkeypatch):
    ours, theirs = pty.openpty()
    os.write(ours, b"\n\nq\n")
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("builtins.input", lambda question: os.write(ours, b"yes\n") and terminal.readline())
        assert "yes" == ask_user("delete? ")
    os.close(ours)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_tour_that_fails_or_is_interrupted_ends_with_its_code(monkeypatch, capfd, interrupted):
    ran = []

    def run_command(command: str) -> int:
        ran.append(command)
        if interrupted and len(ran) == 1:
            raise KeyboardInterrupt
        return 0 if interrupted else called("invoke explain --workers 0 --strategy none")

    called = tour.run_command
    monkeypatch.setattr(tour, "run_command", run_command)
    assert (130 if interrupted else 2) == refusal("tour")[0]
    assert interrupted is (f"invoke down {tour.RUN}" == ran[-1])


def test_the_document_has_every_step_with_what_it_printed():
    written = (ROOT / "docs" / "guides" / "start.md").read_text()
    for number, step in enumerate(STEPS, 1):
        _, found, rest = written.partition(f"## {number}. {step.title}\n")
        assert found, step.title
        assert rest.partition(f"$ {step.command()}\n")[2].partition("```")[0].strip(), step.title
