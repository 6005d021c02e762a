"""The run's summary: how it ended, put together from what the tasks recorded."""

from __future__ import annotations

import time
from typing import Any

from cluster.runs import RunFolder, read_json, read_json_lines, write_json

SETTLE_S = 20.0
"""How long the summary waits for the other tasks' last heartbeats; a task killed for good never sends one."""


def write(run: RunFolder, settle_s: float = SETTLE_S) -> dict[str, Any]:
    """Write `summary.json` for a run that has an outcome; return it."""
    outcome = run.outcome
    assert outcome is not None
    spec = run.load_cluster()
    deadline = time.monotonic() + settle_s
    names = [task.name for task in spec.tasks]
    while time.monotonic() < deadline and not all(
        "exit_code" in run.heartbeats().get(name, {})  # only an agent's last heartbeat has one
        for name in names
    ):
        time.sleep(0.05)
    beats = run.heartbeats()
    result = read_json(run.control / "result.json", {})
    started = read_json(run.control / "started.json")["time"]
    wall_s = outcome["time"] - started
    first_step = next((e["time"] for e in run.events() if e["event"] == "first step" and e["time"] > started), None)
    value = {
        "state": outcome["state"],
        "strategy": spec.strategy_class,
        "replicas": spec.replicas,
        "steps": result.get("steps", max((beat["step"] for beat in beats.values()), default=0)),
        "epochs": result.get("epochs"),
        "startup_s": None if first_step is None else round(first_step - started, 3),
        "wall_s": round(wall_s, 3),
        "examples_per_s": result.get("examples_per_s"),
        "metrics": result.get("metrics", {}),
        "weights_sha256": result.get("weights_sha256"),
        "restarts": _restarts(run, started),
        "goodput": _goodput(run, started, wall_s),
        "tasks": {name: beats.get(name, {}).get("exit_code") for name in names},
    }
    if outcome["state"] == "failed":
        value["cause"] = {key: outcome.get(key) for key in ("task", "exit_code", "step", "error")}
    write_json(run.summary, value)
    return value


def _restarts(run: RunFolder, started: float) -> list[dict[str, Any]]:
    """Return what each restart since `started` cost, in seconds from the failure and in steps done again."""
    events = run.events()
    restarts = []
    for generation in (g for g in run.generations() if g.get("cause") and g["time"] > started):
        later = [e for e in events if e["generation"] == generation["generation"] and e["time"] >= generation["time"]]
        before = [e for e in events if e["generation"] == generation["generation"] - 1]
        fault = next((e["time"] for e in reversed(before) if e["event"] == "fault"), None)
        failed_at = fault or generation["failed_at"]
        first_step = next((e["time"] for e in later if e["event"] == "first step"), None)
        restored = next((e["step"] for e in later if e["event"] == "restored"), None)
        restarts.append(
            {
                "generation": generation["generation"],
                "task": generation["task"],
                "cause": generation["cause"],
                "detected_s": round(generation["time"] - failed_at, 3),
                "resumed_s": None if first_step is None else round(first_step - failed_at, 3),
                "steps_lost": None if restored is None else max(0, generation["step"] - restored),
            }
        )
    return restarts


def _goodput(run: RunFolder, started: float, wall_s: float) -> float | None:
    """Return the share of the wall time spent in steps that count: start, saving and repeated steps do not."""
    config = read_json(run.config, {})
    useful_s, before = 0.0, None
    for row in read_json_lines(run.metrics("chief")):
        if row["time"] >= started and row.get("examples_per_s") and before is not None:
            useful_s += (row["step"] - before) * config["global_batch"] / row["examples_per_s"]
        before = row["step"]
    return round(min(1.0, useful_s / wall_s), 3) if useful_s and wall_s > 0 else None
