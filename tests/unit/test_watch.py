"""Waiting on the host: a run whose engine stopped ends instead of hanging whoever waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster import engine, watch
from cluster.errors import TimedOut
from cluster.files import write_json
from cluster.runs import LOST_AFTER_S, RunFolder
from tests.unit.ending import end


def beat(run: RunFolder, task: str, age_s: float, state: str = "training") -> None:
    values = {"task": task, "role": task.partition("-")[0], "state": state, "generation": 0, "step": 7, "restarts": 0}
    write_json(run.status(task), values | {"examples_per_s": None, "loss": None, "updated_at": time.time() - age_s})


def test_a_run_whose_engine_stopped_ends_as_failed(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(workers=1)
    for task in ("chief", "worker-0"):
        beat(run, task, age_s=LOST_AFTER_S + 5)
    ended = watch.follow(run, lambda value: None, timeout_s=10)
    assert "failed" == ended["state"]
    assert "no task gives a sign of life" in ended["cause"]["error"]
    assert 1 == watch.exit_code(ended)


def test_a_run_with_one_live_task_goes_on(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(workers=1)
    beat(run, "chief", age_s=LOST_AFTER_S + 5)
    beat(run, "worker-0", age_s=0)
    with pytest.raises(TimedOut, match="has not ended after"):
        watch.follow(run, lambda value: None, timeout_s=0.5)
    assert run.outcome is None


def test_watching_asks_no_engine_and_reads_no_event(
    make_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(workers=0)
    write_json(run.path.parent / ".tensorboard.json", {"runtime": "docker", "port": 6006})
    beat(run, "chief", age_s=0)
    looks: list[int] = []
    monkeypatch.setattr(engine, "ask", lambda *words, **_: pytest.fail(f"asked: docker {words}"))
    monkeypatch.setattr(RunFolder, "events", lambda run: pytest.fail("read all events"))

    def end_after_three(value: dict[str, Any]) -> None:
        looks.append(value["step"])
        if len(looks) == 3:
            monkeypatch.undo()
            end(run, "succeeded")

    assert "succeeded" == watch.follow(run, end_after_three, timeout_s=20)["state"]
    assert [7, 7, 7] == looks
