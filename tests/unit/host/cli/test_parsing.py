"""How command lines are read: arguments that may be left out, what was mistyped, and what the shell completes."""

import copy

import pytest
from invoke import Program

import tasks
from cluster.host.launch import folders
from cluster.system.json_files import write_json


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


@pytest.fixture
def complete(monkeypatch, capsys):

    def candidates(typed: str) -> set[str]:
        Program(namespace=copy.deepcopy(tasks.ns)).run(["invoke", "--complete", "--", *typed.split()], exit=False)
        return set(capsys.readouterr().out.split())

    return candidates


@pytest.fixture
def two_runs(make_run):
    make_run("one", workers=1)
    make_run("two", workers=1)
    (folders.runs_dir() / ".current").write_text("one")
    write_json(folders.runs_dir() / ".sweeps" / "rates" / "sweep.json", {})


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("invoke status t", {"one", "two"}),
        ("invoke compare one tw", {"one", "two"}),
        ("invoke up --resume", {"one", "two"}),
        ("invoke logs --run = o", {"one", "two"}),
        ("invoke runs --sweep", {"rates"}),
        ("invoke sweep --resume r", {"rates"}),
        ("invoke logs wo", {"chief", "worker-0"}),
        ("invoke chaos kill w", {"chief", "worker-0"}),
        ("invoke up --loop", {"custom", "fit"}),
        (
            "invoke up --workers 1 --strategy mi",
            {"auto", "one", "mirrored", "central", "multiworker", "ps", "tpu", "pipeline"},
        ),
    ],
)
def test_values_are_completed(complete, two_runs, typed, expected):
    assert expected == complete(typed)


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        ("invoke sta", {"status", "up"}),
        ("invoke logs", {"logs", "chief"}),
        ("invoke chaos", {"chaos", "kill", "storm"}),
        ("invoke chaos kill", {"kill", "worker-0"}),
        ("invoke up --res", {"--resume", "--workers"}),
        ("invoke up --preset", {"fashion_mnist", "transformer_lm"}),
        ("invoke up -- --optimizer.le", {"--epochs", "--optimizer.learning-rate"}),
        ("invoke sweep --over", {"seed=", "optimizer.learning-rate="}),
    ],
)
def test_names_are_completed_as_well(complete, two_runs, typed, some):
    assert some <= complete(typed)


@pytest.mark.parametrize("typed", ["invoke logs 'un", "invoke status --run", "invoke logs"])
def test_completion_never_prints_an_error(complete, capsys, typed):
    complete(typed)
    assert "--precision" not in complete("invoke up -- --p")  # an option of `up` itself
    assert "" == capsys.readouterr().err
