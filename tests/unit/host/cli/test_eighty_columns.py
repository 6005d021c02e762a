"""The screens of a new user's first hour in 80 columns, without a line that the terminal would have to wrap."""

import contextlib
import time

import pytest
from invoke import Exit
from invoke.main import program

import tasks
from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.runtime import tensorboard
from cluster.host.view.live import Live
from cluster.host.view.status import live_lines, read_status, status_table
from cluster.system.json_files import write_json
from tests.support.beats import beat, save
from tests.support.command_line import context, current

WIDTH = 80
RUN, OTHER = "fashion_mnist-20261124-160832", "fashion_mnist-20261124-171500"
NO_ENGINE = "no Docker Engine answers (Cannot connect to the Docker daemon at unix:///var/run/docker.sock)"
ERROR = "InvalidArgumentError: Did not find a shardable source, walked to a node which is not a dataset: " + "x " * 40
PACE = {"step_ms": {"mean": 1234.5, "median": 1234.5}, "busy_share": 1.0, "input_share": 0.99, "pace": {"steps": 50}}


@pytest.fixture(autouse=True)
def terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tensorboard, "running_port", lambda runs_dir: 6006)
    monkeypatch.setattr(engine, "probe", lambda: engine.Availability(ready=False, detail=NO_ENGINE))


def make_ended(make_run, name: str, state: str, **config: object) -> RunFolder:
    """Make a run that ended, with figures as wide as they become."""
    run = current(make_run(name, workers=2))
    write_json(run.config, {"global_batch": 192, "max_steps": 100_000, **config})
    cause = {"task": "worker-0", "exit_code": 1, "error": ERROR} if state == "failed" else {}
    run.end(state, **cause)
    restart = {"generation": 1, "task": "worker-0", "cause": ERROR, "detected_s": 0.5, "resumed_s": 2.25}
    summary = {"state": state, "steps": 100_000, "wall_s": 12345.6, "startup_s": 12.3, "weights_sha256": "a" * 64}
    summary |= {"restarts": [restart], "metrics": {"eval_mean_absolute_percentage_error": 0.9, "eval_loss": 0.3}}
    summary |= {"goodput_split": dict.fromkeys(("start", "compile", "input", "compute", "save", "restart"), 10.0)}
    write_json(run.summary, summary | ({"cause": cause | {"time": time.time()}} if cause else {}))
    return run


def check(text: str | list[str]) -> None:
    """Check that no line is wider than the terminal, except for a long path or address alone or behind a label."""
    lines = text.splitlines() if isinstance(text, str) else text
    assert lines
    assert not [line for line in lines if len(line) > WIDTH and len(line[13:].split()) > 1]


def screen(capsys, command: str, /, *arguments: str, **options: object) -> str:
    capsys.readouterr()
    message = ""
    try:
        tasks.ns[command](context(), *arguments, **options)
    except Exit as ended:
        message = ended.message or ""
    printed = capsys.readouterr()
    return printed.out + printed.err + message


@pytest.mark.parametrize(
    "words", [["--list"], *(["--help", name] for name in sorted(tasks.ns.task_names))], ids=" ".join
)
def test_lists_and_help(capsys, monkeypatch, words):
    monkeypatch.chdir(tasks.__file__.rpartition("/")[0])
    with contextlib.suppress(SystemExit):
        program.run(["invoke", *words], exit=False)
    check(capsys.readouterr().out)


@pytest.mark.parametrize("script", ["", "/home/somebody/projects/train_on_tf_config.py"])
def test_status_and_the_live_view(capsys, make_run, script):
    run = current(make_run(RUN, workers=2))
    for task in run.load_cluster().tasks:
        figures = {"steps_total": 156_300, "examples_per_s": 123_456.7, "loss": 12.3456, "restarts": 12}
        beat(run, task.name, "evaluating", step=123_456, **figures, **PACE)
        run.log(task.name).write_text(f"\r469/469 {'━' * 80} 2s 4ms/step - accuracy: 0.9 - loss: 0.3")
    beat(run, "worker-1", "training", step=123_456, **PACE | {"busy_share": 0.1, "input_share": 0.0})
    run.event("worker-0", "restarted", cause="exit code 139 (SIGSEGV: crashed in native code)", step=123_456)
    save(run, 123_400)
    if script:
        write_json(run.config, {"script": script})
    check(screen(capsys, "status"))
    value = read_status(run)
    for shown in (value, value | {"queued": f"job 7 is queued: {'Resources ' * 12}", "left_out": ["worker-0"]}):
        check(status_table(shown))
        check(live_lines(shown, [3.0, 2.0, 1.0] * 30, WIDTH))
        Live().show(shown)
        check(capsys.readouterr().out)


@pytest.mark.parametrize(("state", "script"), [("succeeded", ""), ("stopped", ""), ("failed", ""), ("failed", "x.py")])
def test_the_end(capsys, make_run, state, script):
    make_ended(make_run, RUN, state, **({"script": script} if script else {}))
    make_ended(make_run, OTHER, state, GRPC_DEFAULT_SSL_ROOTS_FILE_PATH="/etc/ssl")
    for command in ("wait", "status", "runs"):
        check(screen(capsys, command))
    check(screen(capsys, "compare", RUN, OTHER))
    check(screen(capsys, "down", RUN))


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("explain", {"workers": "0"}),
        ("explain", {"workers": "11", "evaluator": True}),
        ("explain", {"workers": "3", "ps": "2"}),
        ("explain", {"file": "tf_config.json"}),
        ("plan", {"name": OTHER}),
        ("up", {"strategy": "mirored"}),
        ("up", {"script": "missing.py"}),
        ("status", {"run": "nothing"}),
        ("scale", {"workers": "3"}),
        ("rerun", {"run": RUN}),
        ("compare", {}),
    ],
)
def test_plans_explanations_and_errors(capsys, monkeypatch, tmp_path, make_run, command, options):
    make_ended(make_run, RUN, "failed")
    (tmp_path / "tf_config.json").write_text('{"cluster": {"worker": ["localhost:1", "10.0.0.300:0"]}, "job": "chief"}')
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    check(screen(capsys, command, **options))
