"""Run folders with files that are torn, empty or too long: commands report it, and other runs are unharmed."""

import contextlib
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invoke import Exit

import tasks
from cluster.contract.results import summary
from cluster.contract.run import heartbeat, logs
from cluster.contract.run.folder import RunFolder
from cluster.host.control import foreground
from cluster.host.runtime import registry, supervisor
from cluster.host.runtime import resources as limits
from cluster.system import files, json_files
from tests.support import damage
from tests.support.command_line import context
from tests.support.waiting import wait_for

READING: dict[str, Callable[[Any, str], Any]] = {
    "status": lambda c, run: tasks.ns["status"](c, run=run),
    "status --json": lambda c, run: tasks.ns["status"](c, run=run, json=True),
    "status --watch": lambda c, run: tasks.ns["status"](c, run=run, watch=True),
    "wait": lambda c, run: tasks.ns["wait"](c, run=run, timeout="1"),
    "plan --resume": lambda c, run: tasks.ns["plan"](c, resume=run, runtime="local"),
    "logs": lambda c, run: tasks.ns["logs"](c, run=run),
    "logs chief": lambda c, run: tasks.ns["logs"](c, "chief", run=run),
}
CHANGING: dict[str, Callable[[Any, str], Any]] = {
    "evaluate": lambda c, run: tasks.ns["evaluate"](c, run=run),
    "export": lambda c, run: tasks.ns["export"](c, run=run),
    "predict": lambda c, run: tasks.ns["predict"](c, run=run, image="x.png"),
    "profile": lambda c, run: tasks.ns["profile"](c, "chief", run=run, steps="1"),
    "chaos kill": lambda c, run: tasks.ns["chaos"](c, "kill", "chief", timeout="1", run=run),
    "chaos corrupt": lambda c, run: tasks.ns["chaos"](c, "corrupt", "chief", timeout="1", run=run),
    "chaos storm": lambda c, run: tasks.ns["chaos"](c, "storm", run=run, faults="1", timeout="1"),
    "scale": lambda c, run: tasks.ns["scale"](c, workers="2", run=run),
    "rerun": lambda c, run: tasks.ns["rerun"](c, run=run, runtime="local", trust=True),
    "stop": lambda c, run: tasks.ns["stop"](c, run=run),
    "up --resume": lambda c, run: tasks.ns["up"](c, resume=run, runtime="local", trust=True, tensorboard_port="0"),
    "down": lambda c, run: tasks.ns["down"](c, run=run, timeout="0"),
    "down (all)": lambda c, run: tasks.ns["down"](c, timeout="0"),
}


@pytest.fixture
def commands(monkeypatch, resolved):
    """Nothing is started, nothing answers, and watchers are quickly at the end of their patience."""
    ticks = itertools.count(0.0, 60.0)
    monkeypatch.setattr(heartbeat, "LONGEST_LOOK_S", 60.0)
    monkeypatch.setattr(heartbeat, "SECOND_LOOK_S", 0.0)
    monkeypatch.setattr(foreground, "POLL_S", 0.0)
    monkeypatch.setattr(
        foreground, "LivenessMonitor", lambda run: heartbeat.LivenessMonitor(run, clock=lambda: next(ticks))
    )
    monkeypatch.setattr(foreground, "STOP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(summary, "SETTLE_S", 0.0)
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(json_files, "NEWEST_BYTES", 10**6)
    monkeypatch.setattr(logs, "PART_BYTES", 10**6)
    monkeypatch.setattr(supervisor, "start_supervisor", lambda run: None)
    monkeypatch.setattr(limits, "check_free_memory", lambda *_, **__: None)
    monkeypatch.setattr("cluster.host.control.profile.PATIENCE_S", 0.2)
    monkeypatch.setattr(registry, "choose_runtime", lambda *_: (registry.LOCAL, "requested"))
    monkeypatch.setattr("cluster.host.image.engine.ask", lambda *_, **__: (1, ""))


@pytest.fixture
def calm(make_run) -> RunFolder:
    """A run that succeeded."""
    run = make_run("calm", workers=1)
    damage.fill(run)
    run.end("succeeded", task="chief")
    summary.write_summary(run, settle_s=0)
    return run


@pytest.fixture
def going(make_run) -> RunFolder:
    """A run that nothing has ended."""
    run = make_run("going", workers=1)
    damage.fill(run)
    return run


@contextlib.contextmanager
def copies(run: RunFolder, other: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunFolder, RunFolder]]:
    """A folder of runs with copies of two."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder, "runs")
        monkeypatch.setenv("RUNS_DIR", str(at))
        yield damage.copy(run, at / "bad"), damage.copy(other, at / "good")


def call(command: Callable[[Any, str], Any], run: str) -> int:
    """Call a command; return its exit code. Whatever is wrong, it says so in one harmless line."""
    ended = None
    try:
        command(context(), run)
    except Exit as raised:
        ended = raised
    assert not ended or (ended.message or "").isprintable()
    code = int(ended.code) if ended else 0
    assert code in (0, 1, 2, 3, 4, 130)
    return code


def contents(run: RunFolder) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in damage.files_of(run)}


@pytest.mark.slow
@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("which", [READING, CHANGING], ids=["read", "act"])
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
    max_examples=30,
)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_commands_say_what_is_wrong(calm, going, capsys, which, seed, count):
    """Damage one of two runs and call commands on it; the other comes out as it was."""
    draw = random.Random(seed)
    run, other = (calm, going) if draw.random() < 0.5 else (going, calm)
    with pytest.MonkeyPatch.context() as patch, copies(run, other, patch) as (bad, good):
        outside = Path(good.path.parent.parent, "outside")
        outside.mkdir()
        (outside / "chief.json").write_text("{}")
        before = contents(good), [path.read_text() for path in outside.iterdir()]
        done = [damage.damage(bad, name, draw, outside) for name in draw.choices(damage.files_of(bad), k=count)]
        for name in draw.sample(list(which), k=min(4, len(which))):
            try:
                call(which[name], "bad")
            except Exception as error:
                raise AssertionError(f"{name} after {'; '.join(done)}") from error
            shown = capsys.readouterr()
            assert not name.startswith("status") or all(line.isprintable() for line in shown.out.splitlines())
        assert 0 == call(READING["status --json"], "good")
        assert before == (contents(good), [path.read_text() for path in outside.iterdir()])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30))])
def test_what_runs_of_a_damaged_run_is_ended(seed, calm, start_gang):
    draw, before = random.Random(seed), contents(calm)
    gang = start_gang("work()", workers=1)
    for task in ("chief", "worker-0"):
        wait_for(lambda task=task: gang.beat(task).state == "training", f"{task} to train")
    outside = calm.path.parent.parent / "outside"
    outside.mkdir()
    names = [name for name in damage.files_of(gang.run) if name != "compose.json"]
    done = [damage.damage(gang.run, name, draw, outside) for name in draw.choices(names, k=6)]
    assert supervisor.processes_left(gang.run), done
    call(lambda c, run: tasks.ns["status"](c, run=run), "run")
    call(lambda c, run: tasks.ns["down"](c, timeout="2"), "")
    assert not supervisor.processes_left(gang.run), done
    assert (before, []) == (contents(calm), list(outside.iterdir()))
