"""Asking a task that trains for a trace: who is refused, who answers, and what is waited for."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.control import profile
from cluster.host.runtime import tensorboard
from cluster.system.errors import RunFailed, TimedOut, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat, beat_all
from tests.support.waiting import wait_for


@pytest.fixture
def run(make_run) -> RunFolder:
    return beat_all(make_run("demo", workers=1))


@contextlib.contextmanager
def answering(run: RunFolder, **answer: Any) -> Iterator[None]:
    """Answer the next request as a task would, in a thread; without an answer the run ends instead."""

    def act() -> None:
        wait_for(run.trace_request.exists, "a request")
        if not answer:
            run.end("succeeded", task="chief")
            return
        request = read_json(run.trace_request)
        write_json(run.trace_answer, {"id": request["id"], "task": request["task"], **answer})
        run.trace_request.unlink()

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_a_task_that_trains_is_asked_and_its_trace_reported(run, monkeypatch):
    monkeypatch.setattr(tensorboard, "running_port", lambda runs_dir: 6007)
    monkeypatch.setattr(profile, "prepare_trace", lambda folder: True)
    for moment in ("2026_01_02_03_04_05", "2026_01_02_03_04_06"):
        (run.tensorboard("worker-0") / "plugins" / "profile" / moment).mkdir(parents=True)
    with answering(run, first=41, last=45):
        head, where, shown = profile.trace_task(run, "worker-0", 5, timeout_s=10)
    assert "steps 41 to 45" in head
    assert where.endswith(" demo/tensorboard/worker-0/plugins/profile")
    assert " http://127.0.0.1:6007/?run=demo%2Ftensorboard%2Fworker-0%2F2026_01_02_03_04_06&" in shown


def test_a_new_trace_is_prepared_for_the_tab_once(run, monkeypatch):
    old, new = (run.tensorboard("chief") / "plugins" / "profile" / name for name in ("1", "2"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    (old / profile.CACHE_VERSION).touch()
    seen: list[Path] = []
    monkeypatch.setattr(profile, "prepare_trace", lambda folder: bool(seen.append(folder)))
    with answering(run, first=41, last=45):
        lines = profile.trace_task(run, "chief", 5, timeout_s=10)
    assert [new] == seen
    assert lines[-1].startswith("note ")


def test_an_invalid_trace_cannot_be_prepared(tmp_path):
    (tmp_path / "vm.xplane.pb").write_bytes(b"no trace")
    assert not profile.prepare_trace(tmp_path)
    assert not (tmp_path / profile.CACHE_VERSION).exists()


@pytest.mark.parametrize(
    ("answer", "why"),
    [({"error": "Another profiler is running."}, "Another profiler is running"), ({}, "ended before")],
)
def test_a_task_that_cannot_trace_and_a_run_that_ends_say_why(run, answer, why):
    with answering(run, **answer), pytest.raises(RunFailed, match=why):
        profile.trace_task(run, "chief", 5, timeout_s=10)


def test_one_request_at_a_time_and_one_that_was_left_behind_is_replaced(run):
    write_json(run.trace_request, {"id": "first", "task": "chief", "until": time.time() + 60})
    with pytest.raises(UsageError, match="is being traced"):
        profile.trace_task(run, "worker-0", 5, timeout_s=0.2)
    assert "first" == read_json(run.trace_request)["id"]
    write_json(run.trace_request, {"id": "first", "task": "chief", "until": time.time() - 1})
    write_json(run.trace_answer, {"id": "another", "task": "worker-0", "first": 1, "last": 5})  # is not taken
    with pytest.raises(TimedOut):
        profile.trace_task(run, "worker-0", 5, timeout_s=0.2)
    assert not run.trace_request.exists()  # nobody waits for it any more
    run.end("stopped", task="chief")
    with pytest.raises(UsageError, match="has ended"):
        profile.trace_task(run, "worker-0", 5, timeout_s=0.2)


@pytest.mark.parametrize("state", ["training", "saving", "evaluating", "waiting", "compiling", "failed"])
def test_only_a_task_that_trains_or_will_continue_is_traced(run, state):
    beat(run, "worker-0", state)
    profile._check_task(run, "chief")
    traced = state in ("training", "saving", "evaluating")
    with contextlib.nullcontext() if traced else pytest.raises(UsageError, match=f"worker-0 is {state}"):
        profile._check_task(run, "worker-0")


@pytest.mark.parametrize(
    ("config", "topology", "task", "named"),
    [
        ({}, {"workers": 1}, "worker-1", "'worker-0'"),
        ({}, {"workers": 1, "ps": 1}, "ps-0", "invoke profile chief"),
        ({}, {"workers": 2, "ps": 1}, "worker-1", "invoke profile chief"),
        ({}, {"workers": 1, "evaluator": True}, "evaluator", "evaluator"),
        ({"loop": "fit"}, {"workers": 2, "ps": 1}, "chief", "--loop custom"),
        ({"script": "train.py", "arguments": []}, {"workers": 1}, "chief", "script"),
    ],
)
def test_what_takes_no_steps_of_ours_is_refused(make_run, config, topology, task, named):
    run = beat_all(make_run("served", **topology))
    if "script" not in config:
        profile._check_task(run, "chief")
    write_json(run.config, read_json(run.config) | config)
    with pytest.raises(UsageError, match=named):
        profile._check_task(run, task)
