"""How command lines are read: what may be left out, what was mistyped, what the shell completes, names and help."""

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
from invoke import Program

import tasks
from cluster.host import kubernetes
from cluster.host.cli import parsing
from cluster.host.launch import folders, planning
from cluster.host.options.request import OPTIONS, Group, Request
from cluster.system.errors import PrerequisiteError
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from tests.support.command_line import context, invoke, options, refusal


def ended(words: str) -> int | str | None:
    with pytest.raises(SystemExit) as exit_:
        Program(namespace=copy.deepcopy(tasks.ns)).run(["invoke", *words.split()])
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
        ("stop --tiemout 3", "invoke --help stop"),
        ("--lsit", "--list"),
        ("up --workers", "--workers"),
        ("status --run --json", "--run"),
        ("logs chief tour", "'tour'"),
        ("up --runtime local --dry --name tour", "--name tour"),
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
def shown(capsys, monkeypatch) -> Callable[..., str]:
    """Returns what `invoke` with these words prints in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*words: str) -> str:
        Program(namespace=copy.deepcopy(tasks.ns)).run(["invoke", *words], exit=False)
        return capsys.readouterr().out

    return show


@pytest.fixture
def complete(shown) -> Callable[[str], set[str]]:
    """Returns the candidates for the last of the typed words."""
    return lambda typed: set(shown("--complete", "--", *typed.split()).split())


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
        ("invoke sta", {"status", "up", ...}),
        ("invoke logs", {"logs", "chief", ...}),
        ("invoke chaos", {"chaos", "kill", "storm", ...}),
        ("invoke chaos kill", {"kill", "worker-0", ...}),
        ("invoke up --res", {"--resume", "--workers", ...}),
        ("invoke up --preset", {"fashion_mnist", "transformer_lm", ...}),
        ("invoke up -- --optimizer.le", {"--epochs", "--optimizer.learning-rate", ...}),
        ("invoke sweep --over", {"seed=", "optimizer.learning-rate=", ...}),
    ],
)
def test_values_and_names_are_completed(complete, make_run, typed, expected):
    for run in ("one", "two"):
        make_run(run, workers=1)
    (folders.runs_dir() / ".current").write_text("one")
    write_json(folders.runs_dir() / ".sweeps" / "rates" / "sweep.json", {})
    found = complete(typed)
    assert expected == found or (... in expected and expected - {...} <= found)


@pytest.mark.parametrize("typed", ["invoke logs 'un", "invoke status --run", "invoke logs"])
def test_completion_never_prints_an_error(complete, capsys, typed):
    complete(typed)
    assert "--precision" not in complete("invoke up -- --p")  # an option of `up` itself
    assert "" == capsys.readouterr().err


# Names and help: every task, every option, every default


ALL_TASKS: list[str] = sorted(tasks.ns.task_names)


def test_the_list_shows_every_task_in_a_sentence(shown):
    lines = shown("--list").splitlines()
    assert list(parsing.DAILY) == [line.split()[0] for line in lines if line[:2] == "  " != line[2:4]][:10]
    assert set(ALL_TASKS) == {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}
    for name in ALL_TASKS:
        assert tasks.ns[name].__doc__.splitlines()[0].endswith("."), name


@pytest.mark.parametrize("name", ALL_TASKS)
def test_help_states_the_default_of_every_option(name):
    task = tasks.ns[name]
    assert set(options(task)) == set(task.help)
    for option, default in options(task).items():
        expected = {False: "(default: no", "": "(default: ", None: "(default: "}.get(default, f"(default: {default}")
        expected = "(default: stay until the end)" if option == "detach" else expected
        assert expected in task.help[option], option


def test_up_and_plan_take_every_option_of_a_request():
    declared = {name: {(list,): None, (bool,): False}.get(each.types, "") for name, each in OPTIONS.items()}
    assert declared | {"file": "", "dry": False} == options(tasks.ns["up"])
    assert declared | {"file": "", "write": "", "json": False} == options(tasks.ns["plan"])


def test_help_of_up_fits_on_a_screen_and_names_the_values(shown):
    text = shown("up", "--help")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert [*parsing.DAILY_OPTIONS, "file", "dry"] == [flag[2:].partition("=")[0] for flag in flags]
    assert {"--workers=N", "--preset=PRESET", "--script=FILE", "--resume=RUN"} <= set(flags)
    assert 50 > text.count("\n")
    assert "STRING" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--help compare", "invoke compare RUN OTHER [THIRD] [FOURTH] [OPTIONS]\n"),
        ("--help-all", "image.build"),
        ("plan --workers 1 --help-all", "--tag=TAG"),
        ("--help-all logs", "--tail=N"),
    ],
)
def test_help_follows_in_any_place(shown, words, expected):
    assert expected in shown(*words.split())


def test_help_lists_every_option_in_its_group(shown):
    options_shown = shown("up", "--help-all").partition("Options:\n")[2]
    groups = [part.splitlines() for part in options_shown.strip("\n").split("\n\n")]
    assert [f"{group}:" for group in Group] == [heading.strip() for heading, *_ in groups]
    for group, (_, *lines) in zip(Group, groups, strict=True):
        flags = [line.split()[0].partition("=")[0] for line in lines if line.startswith("  --")]
        expected = [f"--{each.key}" for each in OPTIONS.values() if each.group == group]
        assert flags[: len(expected)] == expected
        assert bool(flags[len(expected) :]) == (group == Group.COMMAND)


def test_help_lists_what_a_manifest_can_say_alone(shown):
    text = shown("--help-all", "k8s.render")
    assert "--gpus-per-task" in text
    assert not [name for name in kubernetes.NOT_RENDERED if f"--{name.replace('_', '-')}=" in text]


@pytest.fixture
def requested(monkeypatch) -> list[Request]:
    """The requests that reach the planning, which refuses them."""
    requests: list[Request] = []

    def plan(request: Request) -> None:
        requests.append(request)
        raise PrerequisiteError("enough")

    monkeypatch.setattr(planning, "plan", plan)
    return requests


def test_options_and_overrides_reach_the_request(requested):
    refusal("up", context("--epochs 1 --model 'a b'"), workers="3", checkpoint_every="5", evaluator=True)
    overrides = ("--epochs", "1", "--model", "a b")
    assert [Request(workers=3, checkpoint_every="5", evaluator=True, overrides=overrides)] == requested


def test_words_reach_a_script_as_they_were_typed(requested, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["invoke", "up", "--script", "s.py", "--", "two words", "--", "'"])
    refusal("up", context("two words -- '"), script="s.py")  # as invoke joins them
    assert ("two words", "--", "'") == requested[0].overrides


def test_help_behind_the_dashes_shows_the_training_options(tmp_path):
    done = invoke("up", "--", "--help")
    assert (0, "") == (done.returncode, done.stderr)
    assert "--optimizer.learning-rate" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_no_task_imports_tensorflow():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "cluster").rglob("[a-z]*.py")]
    lines = f"import sys, tasks, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "numpy", "tyro", "train"} & set(done.stdout.split())
