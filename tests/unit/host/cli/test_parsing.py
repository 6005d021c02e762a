"""How command lines are read: positional arguments that may be left out, and what was mistyped."""

import pytest
from invoke import Program

import tasks
from cluster.host.launch import folders


def ended(words: str) -> int | str | None:
    with pytest.raises(SystemExit) as exit_:
        Program(namespace=tasks.ns).run(["invoke", *words.split()])
    return exit_.value.code


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("upp", "up"),
        ("image.buil", "image.build"),
        ("zebra", "invoke --list"),
        ("up 3", "invoke --help up"),
        ("up --wrokers 2", "--workers"),
        ("up --epochs 3", "invoke up -- --epochs"),
        ("up --debug", "invoke up -- --epochs"),
        ("down --echo", "invoke --help down"),
        ("--dry down", "--dry"),
        ("status --wach", "--watch"),
        ("stop --tiemout 3", "invoke --help stop"),
        ("--lsit", "--list"),
        ("up --workers", "--workers"),
        ("status --json --run", "--run"),
        ("status --run --json", "--run"),
        ("logs chief tour", "'tour'"),
        ("up tour", "'tour'"),
        ("up --workers 1 status", "'status'"),
        ("up --runtime local --dry --name tour", "--name tour"),
        ("plan --name image.build", "--name image.build"),
    ],
)
def test_what_is_mistyped_is_refused_in_one_line_that_helps(capsys, words, expected):
    assert 2 == ended(words)
    out, err = capsys.readouterr()
    assert ("", 1) == (out, len(err.splitlines()))
    assert err.startswith("error: ")
    assert expected in err


@pytest.mark.parametrize("words", ["status one", "status --run one", "status --run=one --json", "status --json one"])
def test_a_run_may_be_named_with_and_without_its_option(monkeypatch, words):
    named = []
    monkeypatch.setattr(folders, "find_run", lambda run: named.append(run) or folders.RunFolder(folders.runs_dir()))
    ended(words)
    assert ["one"] == named
