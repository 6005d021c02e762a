"""Waiting on the host: a run whose engine stopped ends instead of hanging its watchers."""

import itertools
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.contract.run import heartbeat, owner
from cluster.contract.run.folder import LOST_AFTER_S, RunFolder
from cluster.contract.run.heartbeat import LONGEST_LOOK_S, LivenessMonitor, is_silent, read_live_heartbeats
from cluster.host.control import foreground
from cluster.host.image import engine
from cluster.host.launch import teardown
from cluster.system import processes
from cluster.system.errors import EXIT_INTERRUPTED
from cluster.system.json_files import write_json
from tests.support.beats import beat, end
from tests.support.command_line import end_reader
from tests.support.launching import Commands


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("age_s", [0, LOST_AFTER_S + 5, 1e6, -1e6])
def test_a_run_with_one_live_task_continues_whatever_its_clock_says(make_run, age_s):
    run, looks = make_run(workers=1), itertools.count()
    beat(run, "chief", age_s=LOST_AFTER_S + 5)

    def live(value: dict[str, Any]) -> None:
        if (look := next(looks)) % 15 == 0:
            beat(run, "worker-0", age_s=age_s - look)
        if look > 3 * LOST_AFTER_S:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        foreground.follow(run, live)
    assert run.outcome is None


def test_a_watcher_s_own_sleep_is_not_silence(make_run):
    run, clock = make_run(), [0.0]
    monitor = LivenessMonitor(run, lambda: clock[0])
    beat(run, "chief", age_s=0)
    assert "training" == monitor.look()["chief"].state
    for asleep_s in (100.0, 1e5):
        clock[0] += asleep_s
        assert "training" == monitor.look()["chief"].state
        foreground._notice_silence(run, monitor)
    assert run.outcome is None
    assert LONGEST_LOOK_S * 2 == monitor.silence_s


def test_only_what_was_seen_to_be_silent_is_lost(make_run):
    run, clock = make_run(workers=2), [0.0]
    monitor = LivenessMonitor(run, lambda: clock[0])
    beat(run, "worker-0", age_s=0)
    beat(run, "worker-1", age_s=0, state="done")
    for second in range(int(LOST_AFTER_S) + 2):
        beat(run, "chief", age_s=1000 - second)
        shown = monitor.look()
        clock[0] += 1
    assert ["training", "lost", "done"] == [shown[name].state for name in ("chief", "worker-0", "worker-1")]
    assert 0 == monitor.silence_s


def watch(run: RunFolder, monitor: LivenessMonitor, clock: list[float], most_s: float) -> float:
    """Look every second until the run has ended, or for so long; return how long that was."""
    until = clock[0] + most_s
    while run.outcome is None and clock[0] < until:
        clock[0] += 1
        monitor.look()
        foreground._notice_silence(run, monitor)
    return most_s - (until - clock[0])


def test_a_run_that_never_began_is_waited_for_longer(make_run):
    run, clock = make_run(), [0.0]
    monitor = LivenessMonitor(run, lambda: clock[0])
    assert foreground.START_TIMEOUT_S == watch(run, monitor, clock, foreground.START_TIMEOUT_S)
    run.begin_generation(1, resumed=True)
    monitor.look()
    assert foreground.START_TIMEOUT_S < watch(run, monitor, clock, 200)
    assert "failed" == run.outcome.state


def test_a_run_whose_job_is_gone_ends_soon_with_what_its_scheduler_says(make_run, monkeypatch):
    run, clock = make_run(), [0.0]
    gone = SimpleNamespace(
        is_remote=True, alive=lambda run: clock[0] < LOST_AFTER_S, scheduler_status=lambda run: "job 7 ended"
    )
    monkeypatch.setattr(foreground.registry, "find_runtime", lambda run: gone)
    assert 2 * LOST_AFTER_S > watch(run, LivenessMonitor(run, lambda: clock[0]), clock, 200)
    assert "job 7 ended" == run.outcome.error


@pytest.mark.parametrize("supervised", [True, False])
def test_a_supervisor_that_lives_may_be_silent_for_longer(make_run, supervised):
    """It writes the heartbeats of all tasks while it imports what they need, and hardly can on a loaded machine."""
    run, clock = make_run(), [0.0]
    this = processes.identity(os.getpid())
    owner.record_supervisor(run, owner.create_owner(run, "local"), this if supervised else this | {"start_ticks": 0})
    beat(run, "chief", age_s=0, state="starting")
    monitor = LivenessMonitor(run, lambda: clock[0])
    monitor.look()
    patience_s = foreground.START_TIMEOUT_S if supervised else LOST_AFTER_S
    assert patience_s < watch(run, monitor, clock, 200) <= patience_s + 2


@pytest.mark.parametrize("age_s", [60, -60, 1e6])
def test_a_single_query_looks_twice_and_calls_an_unchanged_task_lost(run, monkeypatch, age_s):
    assert is_silent(run)
    monkeypatch.setattr(heartbeat, "SECOND_LOOK_S", 0.05)
    for state, shown in (("training", "lost"), ("done", "done")):
        beat(run, "chief", state, age_s=age_s)
        assert shown == read_live_heartbeats(run)["chief"].state
    beat(run, "chief", age_s=age_s)
    assert is_silent(run)
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: beat(run, "chief", age_s=age_s - 1))
    assert "training" == read_live_heartbeats(run)["chief"].state
    assert not is_silent(run)


def test_watching_asks_no_engine(run, monkeypatch):
    write_json(run.path.parent / ".tensorboard.json", {"runtime": "docker", "port": 6006})
    beat(run, "chief", age_s=0)
    looks: list[int] = []
    monkeypatch.setattr(engine, "ask", lambda *words, **_: pytest.fail(f"asked: docker {words}"))

    def end_after_three(value: dict[str, Any]) -> None:
        looks.append(value["step"])
        if len(looks) == 3:
            monkeypatch.undo()
            end(run, "succeeded")

    assert "succeeded" == foreground.follow(run, end_after_three, timeout_s=300).state
    assert [0, 0, 0] == looks


@pytest.mark.parametrize("continues", [True, False])
def test_an_interrupt_before_the_run_is_watched_says_whether_it_continues(run, monkeypatch, capsys, continues):
    monkeypatch.setattr(foreground.startup, "start_planned", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(foreground.teardown, "in_progress", lambda run: continues)
    with pytest.raises(KeyboardInterrupt):
        foreground.up(SimpleNamespace(run=run), Commands(), began=0.0)
    assert continues is (run.name in capsys.readouterr().err)


@pytest.mark.parametrize("scripted", [False, True])
def test_an_interrupt_that_also_ends_the_reader_of_the_output_stops_a_run_and_a_second_one_kills_it(
    make_run, monkeypatch, scripted
):
    run = make_run(workers=0)
    if scripted:
        write_json(run.config, {"script": "train.py"})
        run.log("chief").write_text("a line of the script\n")
    for name in ("_watch", "follow"):
        monkeypatch.setattr(foreground, name, Mock(side_effect=KeyboardInterrupt))
    end_reader(monkeypatch)
    assert EXIT_INTERRUPTED == foreground.attend(run, "local", 0, False, Commands())
    assert ("Ctrl-C", "stopped") == (run.stop_request.by, run.load_summary().state)


@pytest.mark.parametrize("state", ["evaluating", "starting", "compiling"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_last_checkpoint_is_evaluated_before_a_run_is_removed(make_run, monkeypatch, capsys, interrupted, state):
    run, removed = make_run(workers=0, evaluator=True), []
    owner.create_owner(run, "local")
    end(run, "succeeded")
    beat(run, "evaluator", state)

    def wait(_seconds: float) -> None:
        if interrupted:
            raise KeyboardInterrupt
        beat(run, "evaluator", "done")

    monkeypatch.setattr(teardown.time, "sleep", wait)
    monkeypatch.setattr(teardown, "remove_run", lambda run, sh: removed.append(run.heartbeat("evaluator").state))
    assert "" == teardown.remove_ended(run, Commands())
    assert [state if interrupted else "done"] == removed
    assert interrupted is (f"evaluate {run.name}" in capsys.readouterr().err)


@pytest.mark.parametrize("config", [{"script": "train.py"}, {}])
def test_a_stop_waits_for_the_grace_period_of_scripts_and_for_a_save(run, monkeypatch, config):
    write_json(run.config, config)
    write_json(run.control / "started.json", {"hang_timeout_s": 60})
    monkeypatch.setenv("SCRIPT_GRACE_S", "600")
    monkeypatch.setattr(foreground, "follow", lambda run, on_status, timeout_s: timeout_s)
    assert foreground.stop(run, "a test") >= foreground.STOP_TIMEOUT_S + 600
