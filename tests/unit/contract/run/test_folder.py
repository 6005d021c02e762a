"""The run folder: signs of life, a life cycle, what only one may claim has one owner, also of a task's copies."""

import errno
import json
import os
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.agent import hub as hub_module
from cluster.agent.run_view import RunView
from cluster.contract.run import heartbeat, joining
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.contract.run.joining import Superseded, TaskCopy
from cluster.contract.run.records import RunResult
from cluster.system.json_files import RESERVE, read_json, write_json
from tests.support.waiting import together, wait_for


def test_a_heartbeat_continues_by_itself_until_it_is_stopped(run, monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.02)
    beat = HeartbeatWriter(run, run.load_cluster().task("chief"), generation=0).start()
    first = read_json(run.status("chief"))["updated_at"]
    wait_for(lambda: read_json(run.status("chief"))["updated_at"] > first, "the next heartbeat")
    beat.update(step=3)
    beat.stop()
    assert 3 == read_json(run.status("chief"))["step"]
    run.status("chief").unlink()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
    assert not run.status("chief").exists()


def test_a_heartbeat_that_was_handed_over_continues_until_its_new_owner_writes(run, monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.02)
    task = run.load_cluster().task("chief")
    agents = HeartbeatWriter(run, task, generation=0).start()
    agents.update(state="waiting")
    agents.hand_over()
    first = read_json(run.status("chief"))["updated_at"]
    wait_for(lambda: read_json(run.status("chief"))["updated_at"] > first, "another heartbeat of the first owner")
    programs = HeartbeatWriter(run, task, generation=0)
    programs.update(state="training")
    wait_for(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()}, "the first owner's end")
    programs.update(state="saving")
    agents.stop()
    assert "saving" == read_json(run.status("chief"))["state"]


def test_events_carry_time_task_generation_and_detail(run):
    run.begin_generation(1)
    run.event("chief", "first step", step=1)
    run.event("worker-0", "restarted", generation=0, cause="exit code 137")
    first, second = run.events()
    assert abs(time.time() - first.time) < 60
    assert ("chief", "first step", 1, 1, {}) == (first.task, first.event, first.generation, first.step, first.detail)
    assert (0, None, {"cause": "exit code 137"}) == (second.generation, second.step, second.detail)


def test_generations_count_as_numbers(run):
    for number in range(1, 12):
        run.begin_generation(number)
    assert 11 == run.generation
    assert list(range(12)) == [generation.generation for generation in run.generations()]


def test_a_look_for_new_generations_changes_the_folder_and_leaves_nothing_in_it(run):
    run.begin_generation(1)
    folder = run.control / "generations"
    os.utime(folder, (1, 1))
    run.refresh_generations()
    assert folder.stat().st_mtime > 1
    assert [0, 1] == [record.generation for record in run.generations()]
    assert {"0.json", "1.json"} == {path.name for path in folder.iterdir()}


def test_a_deleted_run_stays_deleted_if_a_task_still_writes(run):
    run.delete()
    with pytest.raises(FileNotFoundError):
        run.end("failed")
    with pytest.raises(FileNotFoundError):
        write_json(run.status("chief"), {})
    assert not run.path.exists()


def test_a_reopened_run_has_no_end_and_keeps_its_history(run):
    run.event("chief", "first step")
    run.request_stop("a test")
    run.request_stop("another")
    assert "a test" == read_json(run.control / "stop.json")["by"]
    run.end("stopped")
    write_json(run.summary, {})
    write_json(run.control / "result.json", {"steps": 3})
    run.reopen()
    assert (None, False, False) == (run.outcome, run.stop_requested, run.summary.exists())
    assert not (run.control / "result.json").exists()
    assert (1, 0) == (len(run.events()), run.generation)


def test_a_full_disk_leaves_room_for_the_outcome(run, monkeypatch):
    reserve = run.path / RESERVE
    open_as_ever = os.open

    def open_on_a_full_disk(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_CREAT and reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return open_as_ever(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_on_a_full_disk)
    assert run.end("failed", error="the disk is full")
    assert run.outcome is not None
    assert "the disk is full" == run.outcome.error


def test_a_full_disk_does_not_end_the_task_that_reports_it(run, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "write_json", full)
        HeartbeatWriter(run, run.load_cluster().task("chief"), generation=0).update(state="training")
    monkeypatch.setattr(os, "write", full)
    run.event("chief", "checkpoint", step=1)
    assert ({}, []) == (run.heartbeats(), run.events())


def test_training_does_not_wait_for_a_heartbeat_s_disk(run, monkeypatch):
    released, writing = threading.Event(), threading.Event()
    beat = HeartbeatWriter(run, run.load_cluster().task("chief"), generation=0).start()

    def slowly(*arguments: Any, **options: Any) -> None:
        writing.set()
        assert released.wait(60)
        write_json(*arguments, **options)

    monkeypatch.setattr(heartbeat, "write_json", slowly)
    beat.update(state="training", step=1)
    assert writing.wait(60)
    for step in range(2, 50):  # while the disk takes its time
        beat.update(state="saving" if step % 2 else "training", step=step)
    assert "starting" == run.heartbeats()["chief"].state
    released.set()
    wait_for(lambda: 49 == run.heartbeats()["chief"].step, "the newest values")
    beat.update(state="done")
    assert "done" == run.heartbeats()["chief"].state  # the process may end right after
    beat.stop()


BEAT = {"task": "chief", "state": "training", "updated_at": 1.0}


@pytest.mark.parametrize(
    "found",
    [b"", b"x", b"[]", b"{}", b'{"task": "chief"}', *(
        json.dumps(BEAT | wrong).encode()
        for wrong in (
            {"state": "\x1b[2J"}, {"state": ["training"]}, {"step": "7"}, {"step": -1}, {"step": 2**80}, {"step": True},
            {"updated_at": float("nan")}, {"updated_at": 1e300}, {"task": "worker-0"}, {"task": None}, {"pace": []},
        )
    )],
)  # fmt: skip
def test_an_invalid_heartbeat_counts_as_none(run, found):
    write_json(run.status("worker-0"), BEAT | {"task": "worker-0"})
    run.status("chief").write_bytes(found)
    assert ["worker-0"] == list(run.heartbeats())
    (run.path / "status" / "zzz.json").write_bytes(json.dumps(BEAT | {"task": "zzz"}).encode())
    assert ["worker-0"] == list(run.heartbeats())


@pytest.mark.parametrize("left", [b"", b"{}", b"[]", b'{"generation": 2, "time": 1}'])
def test_a_generation_that_a_power_failure_left_empty_has_not_begun(run, left):
    (run.control / "generations" / "1.json").write_bytes(left)
    for name in ("x", "-1", "1e3", "²", "9" * 30):
        (run.control / "generations" / f"{name}.json").write_bytes(b"{}")
    assert (0, [0]) == (run.generation, [each.generation for each in run.generations()])
    begun: list[int] = []
    together(lambda at: run.begin_generation(1, task=f"worker-{at}") and begun.append(at))
    assert (1, 1) == (len(begun), run.generation)
    assert f"worker-{begun[0]}" == run.generations()[-1].task


@pytest.mark.parametrize("left", [b"", b"{}", b'{"state": "x", "time": 1}'])
def test_an_outcome_and_a_stop_that_were_left_empty_are_none(run, left):
    for name in ("outcome", "stop", "result"):
        (run.control / f"{name}.json").write_bytes(left[:1])
    assert (None, False, RunResult()) == (run.outcome, run.stop_requested, run.result)
    assert run.end("failed")
    assert run.request_stop("a test")
    assert ("failed", True) == (run.outcome.state, run.stop_requested)


def test_the_newest_copy_counts(run):
    older, other = TaskCopy.register(run, "worker-0"), TaskCopy.register(run, "chief")
    older.require_newest()
    newer = TaskCopy.register(run, "worker-0")
    assert (True, False, False) == (older.is_superseded, newer.is_superseded, other.is_superseded)
    for record in (run.control / "copies").iterdir():
        record.write_text("")  # damaged, it ends nobody
    assert not older.is_superseded


def test_an_agent_knows_its_copy_by_its_environment(run, monkeypatch):
    monkeypatch.delenv(joining.COPY, raising=False)
    assert TaskCopy.from_environment(run, "worker-0") is None
    copy = TaskCopy.register(run, "worker-0")
    for name, value in copy.environment.items():
        monkeypatch.setenv(name, value)
    assert copy == TaskCopy.from_environment(run, "worker-0")


@pytest.mark.parametrize(
    "claim",
    [
        lambda board: board.begin_generation(1, task="worker-0"),
        lambda board: board.end("failed", task="worker-0"),
        lambda board: board.request_stop("worker-0"),
        lambda board: board.require_newest(),
    ],
)
def test_an_older_copy_claims_nothing(run, claim):
    older = RunView(run, TaskCopy.register(run, "worker-0"))
    newer = RunView(run, TaskCopy.register(run, "worker-0"))
    with pytest.raises(Superseded):
        claim(older)
    assert (0, None, False) == (run.generation, run.outcome, run.stop_requested)
    claim(newer)


def test_an_older_copy_does_not_take_the_newer_one_s_connection(run, monkeypatch):
    monkeypatch.setattr(hub_module, "RETRY_S", 0.05)
    spec = run.load_cluster()
    chief, older = RunView(run), RunView(run, TaskCopy.register(run, "worker-0"))
    chief.connect(spec, spec.task("chief"), "127.0.0.1")
    newer = RunView(run, TaskCopy.register(run, "worker-0"))
    newer.connect(spec, spec.task("worker-0"), "127.0.0.1")
    try:
        wait_for(lambda: newer._link.fresh, "the newer copy's connection")
        older.connect(spec, spec.task("worker-0"), "127.0.0.1")  # as one whose connection broke does again
        wait_for(lambda: not older._link._thread.is_alive(), "the end of its attempts")
        assert newer._link._thread.is_alive()
    finally:
        for board in (older, newer, chief):
            board.disconnect()
