"""What the records of a run folder hold, checked when they are read: tasks can write anything there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from cluster.run.fields import (
    ABSENT,
    Check,
    Record,
    code,
    count,
    every,
    exactly,
    flag,
    listing,
    mapping,
    measured,
    number,
    one_of,
    optional,
    record,
    seconds,
    text,
)
from cluster.spec import MAX_DEVICES, MAX_TASKS, ClusterSpec, Role, Task
from cluster.strategies import STRATEGIES
from cluster.system.json_files import RECORD_BYTES, DamagedError, read_json, warn_once

TASK_BYTES = 2**20
"""The largest record that a task writes often."""

_NEEDED: Any = object()

T = TypeVar("T")
D = TypeVar("D")


@overload
def read(path: Path, check: Callable[[Any], T], *, limit: int = RECORD_BYTES) -> T: ...


@overload
def read(path: Path, check: Callable[[Any], T], default: D, *, limit: int = RECORD_BYTES) -> T | D: ...


def read(path: Path, check: Callable[[Any], Any], default: Any = _NEEDED, *, limit: int = RECORD_BYTES) -> Any:
    """Return a record as its check returns it.

    Args:
        path: the record.
        check: of `cluster/run/fields.py`.
        default: what is returned where there is none yet, or a damaged one; without, there has to be one.
        limit: the largest that is read, in bytes.

    Raises:
        DamagedError: there is none that the check takes, and no default.
    """
    try:
        return check(read_json(path, limit=limit))
    except FileNotFoundError:
        damaged = DamagedError(path, "it is missing")
        if default is not _NEEDED:
            return default
    except DamagedError as error:
        damaged = error
    except ValueError as error:
        damaged = DamagedError(path, str(error))
    if default is _NEEDED:
        raise damaged
    warn_once(damaged)
    return default


STATES = (
    *("starting", "waiting", "compiling", "training", "saving", "evaluating"),
    *("restarting", "done", "failed", "stopped", "lost"),
)
"""Of a task, as its heartbeat has them, and `lost`, which others say of it."""

OUTCOMES = ("succeeded", "stopped", "failed")

_times = optional(mapping(measured))
_pace = record({}, {"step_ms": (_times, None), "input_share": (measured, None), "busy_share": (measured, None)})

heartbeat: Record = every(
    _pace,
    record(
        {"task": text, "state": one_of(*STATES), "updated_at": seconds},
        {
            "role": (text, ""),
            "generation": (count, 0),
            "step": (count, 0),
            "steps_total": (optional(count), ABSENT),
            "examples_per_s": (measured, None),
            "loss": (measured, None),
            "restarts": (count, 0),
            "pace": (optional(_pace), None),
            "exit_code": (optional(code), ABSENT),
            "obstacle": (optional(text), ABSENT),
        },
    ),
)

_attempt: dict[str, tuple[Check, Any]] = {
    "kind": (text, ABSENT),
    "furthest": (number, ABSENT),
    "saved": (number, ABSENT),
    "lived_s": (seconds, ABSENT),
    "pause_s": (seconds, ABSENT),
    "single_steps_from": (count, ABSENT),
}
"""What is recorded of the attempt that a failure ended; -1 for a step stands for none."""

_detail = record(
    {},
    {
        "cause": (optional(text), ABSENT),
        "error": (optional(text), ABSENT),
        "kind": (text, ABSENT),
        "failed_at": (seconds, ABSENT),
        "exit_code": (optional(code), ABSENT),
        **_attempt,
    },
)

event = record(
    {"time": seconds, "task": text, "event": text},
    {"generation": (count, 0), "step": (optional(count), None), "detail": (_detail, {})},
)

row = record(
    {"step": count},
    {"time": (seconds, 0.0), "loss": (measured, ABSENT), "examples_per_s": (measured, None)},
)
"""A line of a task's metrics."""


def generation(begun: int) -> Record:
    """Why a generation was begun: where a failure did, with what is known of that."""

    def checked(value: Any) -> dict[str, Any]:
        found = _generation(value)
        if found["generation"] != begun:
            raise ValueError(f"generation: expected {begun}")
        return _failure({"failed_at": found["time"]} | found) if found.keys() & {"task", "cause"} else found

    return checked


_generation = record({"generation": count, "time": seconds})
_failure = record(
    {"task": text, "failed_at": seconds},
    {"cause": (text, ""), "step": (count, 0), "error": (optional(text), None), **_attempt},
)

end = exactly(
    {
        "task": text,
        "kind": text,
        "cause": text,
        "error": optional(text),
        "at": seconds,
        "furthest": number,
        "lived_s": seconds,
        "may_follow": flag,
    }
)
"""How one task's program ended, as its agent saw it."""

outcome = record(
    {"state": one_of(*OUTCOMES), "time": seconds},
    {
        "task": (optional(text), ABSENT),
        "exit_code": (optional(code), ABSENT),
        "step": (optional(count), ABSENT),
        "error": (optional(text), ABSENT),
    },
)

stop = record({"by": text}, {"then": (text, ""), "time": (seconds, 0.0)})

started = record(
    {},
    {
        "time": (seconds, ABSENT),
        "runtime": (text, ABSENT),
        "hang_timeout_s": (seconds, ABSENT),
        "max_restarts": (count, ABSENT),
        "requirements": (text, ABSENT),
        "memory": (text, ABSENT),
        "network": (text, ABSENT),
        "gpus": (mapping(text), ABSENT),
        "env": (listing(text), ABSENT),
    },
)

ledger = record(
    {
        "generation": count,
        "began": seconds,
        "first_step_at": optional(seconds),
        "first": count,
        "updated_at": seconds,
        "step": count,
        "timed_steps": count,
        "seconds": exactly(dict.fromkeys(("input", "compute", "save", "evaluate"), seconds)),
    },
    {"saves": (mapping(measured), ABSENT)},
)
"""What the chief spent its time on in one generation."""

result = record(
    {},
    {
        "steps": (count, ABSENT),
        "epochs": (measured, None),
        "examples_per_s": (measured, None),
        "metrics": (mapping(measured), {}),
        "weights_sha256": (optional(text), None),
    },
)

config = record(
    {},
    {
        "global_batch": (count, ABSENT),
        "bitwise_elastic": (count, ABSENT),
        "loop": (text, ABSENT),
        "precision": (text, ABSENT),
        "script": (text, ABSENT),
        "arguments": (listing(text), ABSENT),
        "separate_chief": (flag, ABSENT),
    },
)

compose = record(
    {},
    {
        "x-gpus": (mapping(listing(text)), ABSENT),
        "tasks": (mapping(record({"command": listing(text), "environment": mapping(text)})), ABSENT),
        "preload": (text, ABSENT),
        "inherits": (listing(text), ABSENT),
        "network": (text, ABSENT),
    },
)

manifest = record({}, {"runtime": (text, ABSENT)})

_restart = record(
    {},
    {
        "generation": (count, 0),
        "task": (text, ""),
        "cause": (text, ""),
        "detected_s": (measured, None),
        "resumed_s": (measured, None),
        "steps_lost": (optional(count), None),
    },
)

_findings = record(
    {},
    {
        "stragglers": (listing(exactly({"task": text, "slower": number, "input_part": number})), ABSENT),
        "starved": (listing(exactly({"task": text, "input_share": number})), ABSENT),
    },
)


def _rounded(value: Any) -> float:
    return round(seconds(value), 3)


_cause = record(
    {},
    {
        "task": (optional(text), None),
        "exit_code": (optional(code), None),
        "step": (optional(count), None),
        "error": (optional(text), None),
        "time": (seconds, 0.0),
    },
)

_summary = record(
    {"state": one_of(*OUTCOMES)},
    {
        "strategy": (text, ""),
        "steps": (count, 0),
        "epochs": (measured, None),
        "startup_s": (measured, None),
        "wall_s": (seconds, 0.0),
        "examples_per_s": (measured, None),
        "metrics": (mapping(measured), {}),
        "weights_sha256": (optional(text), None),
        "restarts": (listing(_restart), []),
        "goodput": (measured, None),
        "goodput_split": (optional(every(mapping(_rounded), record({"input": seconds, "compute": seconds}))), None),
        "pace": (_findings, {}),
        "tasks": (mapping(optional(code)), {}),
        "cause": (_cause, ABSENT),
    },
)


def summary(value: Any) -> dict[str, Any]:
    """How a run ended; of one that failed, with the cause."""
    found: dict[str, Any] = _summary(value)
    return found | {"cause": _cause(found.get("cause", {}))} if found["state"] == "failed" else found


def _pid(value: Any) -> int:
    if not 0 < count(value) < 2**22:
        raise ValueError("expected the id of a process")
    return int(value)


process = record({"pid": _pid}, {"start_ticks": (optional(count), None)})
programs = record({"agent": process, "program": process})
checkpoint = record({"files": mapping(record({}, {"size_bytes": (count, 0)}))})
trace_answer = record(
    {"id": text, "task": text},
    {"first": (count, 0), "last": (count, 0), "error": (text, ABSENT)},
)
"""The answer to a request for a trace."""

trace_request = record({"id": text, "task": text, "until": seconds})
"""A request for a trace."""

HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,253}")

_task = record({"role": one_of(*Role), "index": count, "host": text, "port": count})
_cluster = record({"strategy": one_of(*STRATEGIES), "devices": count, "tasks": listing(_task, 3 * MAX_TASKS)})


def cluster(value: Any) -> ClusterSpec:
    """The cluster of a run: with one chief, and every task there once."""
    found = ClusterSpec.from_json(_cluster(value))
    names = [task.name for task in found.tasks]
    if names.count("chief") != 1 or len(set(names)) < len(names):
        raise ValueError("expected one chief, and every task once")
    if not 1 <= found.devices <= MAX_DEVICES:
        raise ValueError(f"devices: expected a whole number from 1 to {MAX_DEVICES}")
    if bad := [task for task in found.tasks if not _listens(task)]:
        raise ValueError(f"tasks: expected an address of {bad[0].name[:40]}")
    return found


def _listens(task: Task) -> bool:
    return bool(HOST.fullmatch(task.host)) and 0 < task.port < 2**16 and task.index < MAX_TASKS
