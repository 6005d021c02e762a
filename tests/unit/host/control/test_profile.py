"""Asking a task that trains for a trace: who is refused, who answers, and what is waited for."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HeartbeatWriter
from cluster.host.control import profile
from cluster.host.runtime import tensorboard
from cluster.system.errors import RunFailed, TimedOut, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.waiting import wait_for


def beats(run: RunFolder, state: str = "training", **others: str) -> RunFolder:
    """Leave every task's heartbeat, all in the same state but for `others`, their names with an underscore."""
    for task in run.load_cluster().tasks:
        beat = HeartbeatWriter(run, task, 0)
        beat.update(state=others.get(task.name.replace("-", "_"), state))
        beat.write()
    return run


@pytest.fixture
def run(make_run) -> RunFolder:
    return beats(make_run("demo", workers=1))


def answer(run: RunFolder, **answer: Any) -> threading.Thread:
    """Answer the next request as a task would, in a thread."""

    def act() -> None:
        wait_for(run.trace_request.exists, "a request")
        request = read_json(run.trace_request)
        write_json(run.trace_answer, {"id": request["id"], "task": request["task"], **answer})
        run.trace_request.unlink()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_task_that_trains_is_asked_and_its_trace_reported(run, monkeypatch):
    monkeypatch.setattr(tensorboard, "running", lambda runs_dir: 6007)
    monkeypatch.setattr(profile, "prepare", lambda folder: True)
    for moment in ("2026_01_02_03_04_05", "2026_01_02_03_04_06"):
        (run.tensorboard("worker-0") / "plugins" / "profile" / moment).mkdir(parents=True)
    thread = answer(run, first=41, last=45)
    assert [
        "worker-0: steps 41 to 45 traced (5)",
        "trace        demo/tensorboard/worker-0/plugins/profile",
        "TensorBoard  http://127.0.0.1:6007/?run=demo%2Ftensorboard%2Fworker-0%2F2026_01_02_03_04_06"
        "&tag=trace_viewer%40#profile",
    ] == profile.trace(run, "worker-0", 5, timeout_s=10)
    thread.join()


def test_more_steps_than_requested_are_reported(run):
    thread = answer(run, first=41, last=60)
    head, _, where = profile.trace(run, "chief", 5, timeout_s=10)
    thread.join()
    assert "chief: steps 41 to 60 traced (20, 5 steps requested: whole calls of the training are traced)" == head
    assert "TensorBoard  invoke tensorboard, then its Profile tab" == where


def test_a_new_trace_is_prepared_for_the_tab_once(run, monkeypatch):
    old, new = (run.tensorboard("chief") / "plugins" / "profile" / name for name in ("1", "2"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    (old / profile.CACHE_VERSION).touch()
    seen: list[Path] = []
    monkeypatch.setattr(profile, "prepare", lambda folder: bool(seen.append(folder)))
    thread = answer(run, first=41, last=45)
    lines = profile.trace(run, "chief", 5, timeout_s=10)
    thread.join()
    assert [new] == seen
    assert "note         not prepared for the Profile tab in a container; `make setup` renews .venv" == lines[-1]


def test_what_is_no_trace_cannot_be_prepared(tmp_path):
    (tmp_path / "vm.xplane.pb").write_bytes(b"no trace")
    assert not profile.prepare(tmp_path)
    assert not (tmp_path / profile.CACHE_VERSION).exists()


def test_the_answer_to_another_request_is_not_taken(run):
    write_json(run.trace_answer, {"id": "another", "task": "chief", "first": 1, "last": 5})
    with pytest.raises(TimedOut, match=r"^no trace of chief in 0.2 s; it may be restarting"):
        profile.trace(run, "chief", 5, timeout_s=0.2)
    assert not run.trace_request.exists()  # nobody waits for it any more


def test_a_task_that_cannot_trace_says_why(run):
    thread = answer(run, error="Another profiler is running.")
    with pytest.raises(RunFailed, match=r"^chief cannot be traced: Another profiler is running.; end the other trace"):
        profile.trace(run, "chief", 5, timeout_s=10)
    thread.join()


def test_a_run_that_ends_meanwhile_answers_nothing(run):
    def end() -> None:
        wait_for(run.trace_request.exists, "a request")
        run.end("succeeded", task="chief")

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(RunFailed, match=r"^run 'demo' ended before chief had traced its steps"):
        profile.trace(run, "chief", 5, timeout_s=10)
    thread.join()


def test_one_request_at_a_time(run):
    write_json(run.trace_request, {"id": "first", "task": "chief", "until": time.time() + 60})
    with pytest.raises(UsageError, match=r"^chief of run 'demo' is being traced; wait until that is done"):
        profile.trace(run, "worker-0", 5, timeout_s=0.2)
    assert "first" == read_json(run.trace_request)["id"]


def test_a_request_that_was_left_behind_is_replaced(run):
    write_json(run.trace_request, {"id": "first", "task": "chief", "until": time.time() - 1})
    with pytest.raises(TimedOut):
        profile.trace(run, "worker-0", 5, timeout_s=0.2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("waiting", "worker-0 is waiting, expected one that trains; try again once it trains"),
        ("compiling", "worker-0 is compiling, expected one that trains; try again"),
        ("failed", "worker-0 is failed, expected one that trains; see `invoke logs worker-0`"),
    ],
)
def test_a_task_that_does_not_train_is_refused(run, state, message):
    beats(run, worker_0=state)
    with pytest.raises(UsageError, match=f"^{message}"):
        profile._check(run, "worker-0")
    profile._check(run, "chief")


@pytest.mark.parametrize("state", ["training", "saving", "evaluating"])
def test_a_task_that_saves_or_evaluates_will_train_again(run, state):
    profile._check(beats(run, state), "chief")


def test_a_task_that_is_none_is_refused_with_the_nearest_name(run):
    with pytest.raises(UsageError, match="worker-1.*'worker-0'"):
        profile._check(run, "worker-1")


def test_a_run_that_has_ended_is_refused(run):
    run.end("stopped", task="chief")
    with pytest.raises(UsageError, match=r"^run 'demo' has ended, so nothing trains in it; `invoke up --resume demo`"):
        profile._check(run, "chief")


@pytest.mark.parametrize("name", ["ps-0", "worker-1"])
def test_what_serves_the_chief_is_refused(make_run, name):
    run = beats(make_run("served", workers=2, ps=1, evaluator=True))
    with pytest.raises(UsageError, match=f"^{name} takes no steps itself.*`invoke profile chief`"):
        profile._check(run, name)
    with pytest.raises(UsageError, match=r"^evaluator takes no training steps"):
        profile._check(run, "evaluator")
    profile._check(run, "chief")
    write_json(run.config, read_json(run.config) | {"loop": "fit"})
    with pytest.raises(UsageError, match="use --loop custom to trace there"):
        profile._check(run, "chief")


def test_a_script_is_refused(run, tmp_path):
    write_json(run.config, {"script": "train.py", "arguments": []})
    with pytest.raises(UsageError, match="^run 'demo' is one of a script, which takes its own steps; call tf.profiler"):
        profile._check(run, "chief")
