"""The command line: names, help with defaults, one line and the right exit code for every error, dry runs."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke import Config, Context, Exit, MockContext, Result, Task
from invoke.exceptions import ThreadException
from invoke.util import ExceptionWrapper

import tasks
from cluster.checks import doctor
from cluster.cli.command_line import report_errors
from cluster.control import watch
from cluster.errors import EXIT_USAGE, PrerequisiteError, TimedOut
from cluster.findings import Finding
from cluster.image import engine, images, locks
from cluster.launch import configuration, folders, planning, startup, teardown
from cluster.options.option import Group
from cluster.options.request import OPTIONS, Request
from cluster.paths import ROOT
from cluster.run import owner
from cluster.run.folder import RunFolder
from cluster.runtime import tensorboard as board
from cluster.runtime.compose import overlay
from cluster.runtime.local import supervisor
from cluster.system.json_files import write_json

MakeRun = Callable[..., RunFolder]

CONTRACT = {
    *("up", "plan", "status", "logs", "wait", "stop", "down", "scale", "evaluate", "export", "tensorboard", "doctor"),
    *("verify", "rerun", "chaos", "profile", "bench", "test", "predict", "golden", "timeline"),
    *("explain", "runs", "compare", "report", "env", "clean", "tour"),
}
COLLECTIONS = {"image", "data", "docs", "swarm", "k8s", "requirements"}
BUILT = {
    *("up", "plan", "status", "logs", "wait", "stop", "down", "tensorboard", "doctor", "test"),
    *("evaluate", "export", "predict", "verify", "bench"),
    *(
        "image.base",
        "image.build",
        "image.reproduce",
        "image.sbom",
        "data.prepare",
        "data.shard",
        "data.verify",
        "requirements.lock",
    ),
}
ALL_TASKS: list[str] = sorted(tasks.ns.task_names)


def invoke(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `invoke` as a user does."""
    command = [sys.executable, "-m", "invoke", *words]
    environment = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def context(remainder: str = "", exited: int = 0) -> MockContext:
    """Return a context that remembers commands instead of running them."""
    made = MockContext(run=Result(exited=exited), repeat=True)
    made._set(remainder=remainder)
    return made


def real_context() -> Context:
    """Return a context that runs commands, with the settings of invoke.yaml."""
    config = Config(project_location=str(ROOT))
    config.load_project()
    return Context(config)


def commands(c: MockContext) -> list[str]:
    """Return the commands that a task ran."""
    return [call.args[0] for call in c.run.call_args_list]


def refusal(task: str, c: Context | None = None, /, **options: Any) -> tuple[int, str]:
    """Return the exit code and the message that a task ends with."""
    with pytest.raises(Exit) as ended:
        tasks.ns[task](c or context(), **options)
    return ended.value.code, ended.value.message or ""


def options(task: Task) -> dict[str, Any]:
    """Return a task's options and their defaults."""
    parameters = list(inspect.signature(task.body).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


# Names and help


def test_tasks_have_the_contract_s_names() -> None:
    assert set(ALL_TASKS) >= BUILT
    assert {name for name in ALL_TASKS if "." not in name} <= CONTRACT
    assert {name.split(".")[0] for name in ALL_TASKS if "." in name} <= COLLECTIONS


def test_the_list_shows_every_task_in_a_sentence() -> None:
    lines = invoke("--list").stdout.splitlines()
    assert set(ALL_TASKS) == {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}
    for name in ALL_TASKS:
        assert tasks.ns[name].__doc__.splitlines()[0].endswith("."), name


@pytest.mark.parametrize("name", ALL_TASKS)
def test_help_states_the_default_of_every_option(name: str) -> None:
    task = tasks.ns[name]
    assert set(options(task)) == set(task.help)
    for option, default in options(task).items():
        expected = {False: "(default: no", "": "(default: ", None: "(default: "}.get(default, f"(default: {default}")
        expected = "(default: stay until the end)" if option == "detach" else expected
        assert expected in task.help[option], option


def test_up_and_plan_take_every_option_of_a_request() -> None:
    declared = {name: None if name == "env" else each.empty for name, each in OPTIONS.items()}
    assert declared | {"file": "", "dry": False} == options(tasks.ns["up"])
    assert declared | {"file": "", "write": "", "json": False} == options(tasks.ns["plan"])


@pytest.mark.parametrize("task", ["up", "plan"])
def test_help_lists_every_option_in_its_group(task: str) -> None:
    shown = invoke(task, "--help", COLUMNS="80").stdout.partition("Options:\n")[2]
    assert max(len(line) for line in shown.splitlines()) <= 80
    groups = [part.splitlines() for part in shown.strip("\n").split("\n\n")]
    assert [f"{group}:" for group in Group] == [heading.strip() for heading, *_ in groups]
    for group, (_, *lines) in zip(Group, groups, strict=True):
        flags = [words[0].partition("=")[0] for line in lines if (words := line.split())[0].startswith("--")]
        expected = [f"--{each.key}" for each in OPTIONS.values() if each.group == group]
        assert flags[: len(expected)] == expected
        assert bool(flags[len(expected) :]) == (group == Group.COMMAND)


def test_options_and_overrides_reach_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def plan(request: Request, *, installs: bool) -> None:
        requested.append(request)
        raise PrerequisiteError("enough")

    monkeypatch.setattr(planning, "plan", plan)
    refusal("up", context("--epochs 1 --model 'a b'"), workers="3", checkpoint_every="5", evaluator=True)
    overrides = ("--epochs", "1", "--model", "a b")
    assert [Request(workers="3", checkpoint_every="5", evaluator=True, overrides=overrides)] == requested


def test_words_reach_a_script_as_they_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def plan(request: Request, *, installs: bool) -> None:
        requested.append(request.overrides)
        raise PrerequisiteError("enough")

    monkeypatch.setattr(planning, "plan", plan)
    monkeypatch.setattr(sys, "argv", ["invoke", "up", "--script", "s.py", "--", "two words", "--", "'"])
    refusal("up", context("two words -- '"), script="s.py")  # as invoke joins them
    assert [("two words", "--", "'")] == requested


@pytest.mark.parametrize("task", ["up", "plan"])
def test_help_behind_the_dashes_shows_the_training_options(task: str, tmp_path: Path) -> None:
    done = invoke(task, "--", "--help")
    assert (0, "") == (done.returncode, done.stderr)
    assert "--optimizer.learning-rate" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_no_task_imports_tensorflow() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "cluster").rglob("[a-z]*.py")]
    lines = f"import sys, tasks, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "numpy", "tyro", "train"} & set(done.stdout.split())


# Errors


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["up", "--workers", "two"], 2, "error: --workers 'two': expected a whole number from 0 to 512"),
        (["up", "--runtime=local", "--", "--epoch", "1"], 2, "error: override '--epoch' is not an option"),
        (["up", "--runtime=docker"], 3, "error: --runtime docker: no Docker Engine answers (docker is not"),
        (["status"], 2, "error: there is no current run; start one with `invoke up`, or name one of runs/"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    done = invoke(*words, PATH=str(tmp_path))
    assert (code, 1, "") == (done.returncode, len(done.stderr.splitlines()), done.stdout)
    assert done.stderr.startswith(message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "unbuffered", "ends"),
    [
        ("plan --runtime local --json", "", (141, 0)),
        ("plan --runtime local --json", "1", (141, 0)),
        ("status", "1", (2, 1)),  # what is wrong is reported all the same
    ],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(words: str, unbuffered: str, ends: tuple[int, int]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "invoke", *words.split()],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert ends == (done.returncode, len(done.stderr.splitlines())), done.stderr


def test_a_command_that_shows_another_s_output_to_nobody_ends_quietly() -> None:
    def show(c: Context, error: Exception) -> None:
        raise ThreadException([ExceptionWrapper({}, type(error), error, None)])

    with pytest.raises(Exit) as ended:
        report_errors(show)(Context(), BrokenPipeError())
    assert (141, None) == (ended.value.code, ended.value.message)
    with pytest.raises(ThreadException):
        report_errors(show)(Context(), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"))


@pytest.mark.parametrize(
    ("task", "requested", "expected"),
    [
        ("logs", {"task": "worker-7"}, "error: no task 'worker-7' in this cluster; did you mean 'worker-0'?"),
        ("logs", {"run": "a/b"}, "error: run name 'a/b': expected letters, digits"),
        ("status", {"run": "rum"}, "error: there is no run 'rum' in "),
        ("wait", {"timeout": "soon"}, "error: --timeout 'soon': expected a whole number from 1 to 1000000000"),
        ("stop", {"run": "absent"}, "error: there is no run 'absent' in "),
        ("down", {"run": "absent"}, "error: there is no run 'absent' in "),
        ("tensorboard", {"port": "0"}, "error: --port '0': expected a whole number from 1 to 65535"),
        ("tensorboard", {"runtime": "podman"}, "error: --runtime 'podman' is not a runtime"),
    ],
)
def test_wrong_usage_ends_with_2_and_starts_nothing(
    make_run: MakeRun, task: str, requested: dict[str, str], expected: str
) -> None:
    current(make_run(workers=1))
    c = context()
    code, message = refusal(task, c, **requested)
    assert (2, 1, []) == (code, len(message.splitlines()), commands(c))
    assert message.startswith(expected)


def current(run: RunFolder) -> RunFolder:
    """Make it the current run."""
    (run.path.parent / ".current").write_text(run.name + "\n")
    return run


def test_waiting_too_long_ends_with_4(make_run: MakeRun) -> None:
    run = current(make_run(workers=0))
    beat = {"task": "chief", "state": "training", "step": 1, "updated_at": time.time(), "examples_per_s": None}
    write_json(run.status("chief"), beat | {"loss": None, "restarts": 0})
    message = "error: run run has not ended after 1 s; it goes on, see `invoke status`"
    assert (4, message) == refusal("wait", timeout="1")


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("stopped", 130)])
def test_waiting_reports_how_the_run_ended(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    run = current(make_run(workers=0))
    values = {"steps": 5, "wall_s": 1.0, "startup_s": None, "metrics": {}, "restarts": []}
    write_json(run.summary, {"state": state} | values)
    assert (code, "") == refusal("wait")
    assert capsys.readouterr().out.startswith(f"{state}: 5 steps in 1.0 s\n")


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(request: Request, *, installs: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan", interrupt)
    assert (130, "interrupted") == refusal("up")


@pytest.mark.parametrize(("state", "code"), [("warning", 0), ("failed", 3)])
def test_the_doctor_ends_with_3_where_something_must_be_mended(
    monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("check", state, "found")])
    assert (code, "") == refusal("doctor")


IMAGE = {"Id": "sha256:1", "Config": {"Labels": {}}, "RootFS": {"Layers": ["sha256:0"]}}


@pytest.fixture
def engine_that_fails(docker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a `docker` on the PATH that fails at one command and has one image; returns the list of calls."""

    def put(fails_at: str) -> Path:
        calls = docker(
            f'case "$*" in\n*"{fails_at}"*) echo "the engine is gone" >&2; exit 17;;\n'
            "info*) echo '\"26.1.5\"';;\n*version*) echo 2.26.1;;\n"
            f"*'{{{{json .}}}}'*) echo '{json.dumps(IMAGE)}';;\n*RootFS*) echo '[[], []]';;\n"
            "image*) echo '{}';;\nesac"
        )
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/bin:/bin")
        config = {"dataset": "mnist", "global_batch": 192}
        monkeypatch.setattr(configuration, "resolve", lambda *_: (config, (), ""))
        monkeypatch.setattr(startup, "data_command", lambda verb, name, path: "true")
        return calls

    return put


def test_an_engine_that_stops_while_it_builds_ends_the_start(
    engine_that_fails: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = engine_that_fails("build ")
    code, message = refusal("up", real_context(), name="one", runtime="docker", tensorboard_port="0")
    assert 1 == code
    assert message.startswith("error: ") and " && docker build " in message
    assert 1 == len(message.splitlines())
    assert "the engine is gone" in capfd.readouterr().err
    assert not (tmp_path / "runs" / "one").exists()
    assert " up " not in calls.read_text()


def test_an_engine_that_stops_half_way_leaves_nothing_behind(
    engine_that_fails: Callable[[str], Path], tmp_path: Path
) -> None:
    calls = engine_that_fails(" up ")
    code, message = refusal("up", real_context(), name="one", runtime="docker", tensorboard_port="0")
    assert 1 == code
    assert message.startswith("error: ") and " && docker compose " in message
    up, down = calls.read_text().splitlines()[-2:]
    run_dir = tmp_path / "runs" / "one"
    assert str(run_dir / "compose.json") in up
    assert f" --project-name {overlay.project(run_dir)} " in down
    assert down.endswith(" down --timeout 10 --volumes --remove-orphans")


# Dry runs


def test_a_dry_run_prints_what_local_processes_would_be_started_with(tmp_path: Path) -> None:
    done = invoke("up", "--dry", "--runtime=local", "--name=one", "--workers=1", "--", "--epochs", "1")
    first, prepare, chief, worker = done.stdout.splitlines()
    assert (0, "") == (done.returncode, done.stderr)
    assert first.startswith("MultiWorkerMirroredStrategy on 2 tasks")
    assert startup.data_command("prepare", "fashion_mnist") == prepare
    for line, task in ((chief, "chief"), (worker, "worker-0")):
        folders = f"RUN_DIR={tmp_path}/runs/one DATA_DIR={tmp_path}/data"
        assert line.startswith(f"{folders} TASK={task} CUDA_VISIBLE_DEVICES=-1 TF_CONFIG='{{")
        assert line.endswith(f" {shlex.quote(sys.executable)} -m cluster.agent &")
    assert not (tmp_path / "runs").exists()
    assert [] == supervisor.processes_left(RunFolder(tmp_path / "runs" / "one"))


def test_a_dry_run_only_asks_the_engine(
    engine_that_fails: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = engine_that_fails("no such call")
    tasks.ns["up"](context(), name="one", runtime="docker", dry=True)
    printed = capsys.readouterr().out.splitlines()
    assert " up --detach --no-build --pull never chief worker-0 worker-1" in printed[-2]
    assert "--profile tensorboard up --detach tensorboard" in printed[-1]
    assert {"info", "compose", "image"} >= {call.split()[0] for call in calls.read_text().splitlines()}
    assert " up " not in calls.read_text()
    assert not (tmp_path / "runs").exists()


# What the other tasks run


def what_test_runs(*exited: int, **options: Any) -> tuple[int, list[str]]:
    """Return how `test` ends where its parts end so, and what each part's pytest was given."""
    c = MockContext(run=[Result(exited=code) for code in exited])
    code, message = refusal("test", c, **options)
    assert "" == message
    return code, [command.removeprefix(f"{shlex.quote(sys.executable)} -m pytest ") for command in commands(c)]


TWO_AT_A_TIME = "--numprocesses=2 --dist=loadfile --no-loadscope-reorder"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, [f"tests -m 'not long' {TWO_AT_A_TIME}"]),
        ({"all": True}, [f"tests -m 'not alone' {TWO_AT_A_TIME}", "tests -m alone"]),
        ({"select": "agent and not ps"}, [f"tests -m 'not long' {TWO_AT_A_TIME} -k 'agent and not ps'"]),
    ],
)
def test_test_runs_two_files_at_a_time_and_then_those_that_fill_the_machine(
    options: dict[str, Any], parts: list[str]
) -> None:
    assert (0, parts) == what_test_runs(*([0] * len(parts)), **options)


def test_the_fast_tests_are_chosen_by_a_rule_and_no_list() -> None:
    code, parts = what_test_runs(0, fast=True)
    assert (0, 1) == (code, len(parts))
    assert parts[0].startswith("tests --ignore=tests/e2e -p tests.fast ")


def test_all_and_fast_exclude_each_other() -> None:
    code, _ = refusal("test", MockContext(), all=True, fast=True)
    assert 2 == code


@pytest.mark.parametrize(
    ("exited", "expected"), [((1, 0), 1), ((0, 1), 1), ((-9, 0), -9), ((5, 0), 0), ((1, 5), 1), ((5, 5), 5)]
)
def test_a_failure_in_either_part_of_the_tests_is_reported_after_both(exited: tuple[int, int], expected: int) -> None:
    """5: none of the part's tests was selected, which is wrong only where the other has none either."""
    code, parts = what_test_runs(*exited, all=True)
    assert (expected, 2) == (code, len(parts))


def test_an_interrupted_test_run_goes_no_further() -> None:
    assert (2, 1) == (what_test_runs(2)[0], len(what_test_runs(2)[1]))


def test_tasks_run_the_commands_that_their_module_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "base_commands", lambda: ["make a base"])
    monkeypatch.setattr(locks, "lock_commands", lambda upgrade: [["lock", f"upgrade={upgrade}"]])
    for task, requested, expected in [
        ("image.base", {}, ["make a base"]),
        ("data.prepare", {"name": "mnist"}, [startup.data_command("prepare", "mnist")]),
        ("data.prepare", {"fresh": True}, [startup.data_command("prepare", "fashion_mnist") + " --fresh"]),
        ("data.verify", {}, [startup.data_command("verify", "fashion_mnist")]),
        ("requirements.lock", {"upgrade": True}, ["lock upgrade=True"]),
    ]:
        c = context()
        tasks.ns[task](c, **requested)
        assert expected == commands(c)


@pytest.mark.parametrize("stops", [True, False])
def test_down_ends_a_run_even_if_it_does_not_stop(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stops: bool
) -> None:
    run, killed = current(make_run(workers=0)), []

    def stop(folder: RunFolder, by: str, timeout_s: float) -> None:
        assert (run, "invoke down", 15) == (folder, by, timeout_s)
        if not stops:
            raise TimedOut("it hangs")

    monkeypatch.setattr(teardown, "in_progress", lambda folder: True)
    monkeypatch.setattr(watch, "stop", stop)
    monkeypatch.setattr(supervisor, "kill", killed.append)
    assert (0, "") == refusal("down", run="run")
    assert [run] == killed
    assert capsys.readouterr().out.startswith("run is down; its folder is ")


def test_down_ends_every_run_that_is_left_and_tensorboard(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left, stopped = make_run("left"), []
    make_run("ended")
    owner.begin(left, "local")
    monkeypatch.setattr(engine, "ask", lambda *words: (127, "docker is not installed"))
    monkeypatch.setattr(supervisor, "processes_left", lambda run, table: [1] if run == left else [])
    monkeypatch.setattr(supervisor, "kill", stopped.append)
    monkeypatch.setattr(board, "stop", lambda runs_dir, sh: stopped.append(runs_dir) is None)
    assert (0, "") == refusal("down")
    assert [left, folders.runs_dir()] == stopped
    assert "TensorBoard is down" == capsys.readouterr().out.splitlines()[-1]


def test_down_takes_one_run_or_all_of_them() -> None:
    assert EXIT_USAGE == refusal("down", run="one", all=True)[0]
