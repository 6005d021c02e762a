"""The status of a run: what it is, as `--json` shows it, and as a table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from cluster.contract.results import goodput, stragglers
from cluster.contract.run import membership, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.liveness import final_state, look_once
from cluster.contract.run.records import FINAL_STATES, Heartbeat, TaskState
from cluster.host.runtime import registry, tensorboard
from cluster.host.view.columns import columns, plain_lines
from cluster.host.view.sparkline import bar, sparkline


def read_status(
    run: RunFolder, beats: dict[str, Heartbeat] | None = None, *, with_board: bool = True
) -> dict[str, Any]:
    """Return the run's status, as `invoke status --json` shows it.

    Args:
        run: whose.
        beats: its heartbeats, with the state of silent tasks replaced, from whoever watches it; else they are read.
        with_board: whether to look for TensorBoard, which may need a call of the engine.

    Raises:
        DamagedError: the run's description is damaged.
    """
    spec, config = run.load_cluster(), run.load_config()
    beats = look_once(run) if beats is None else beats
    summary = run.ended
    paces = {name: beat.recent_pace for name, beat in beats.items() if beat.state == TaskState.TRAINING}
    chief = beats.get("chief") or Heartbeat(task="chief", state=TaskState.STARTING, updated_at=0.0)
    step, total, rate = chief.step, chief.steps_total, chief.examples_per_s
    batch = config.get("global_batch", 0)
    port = tensorboard.running(run.path.parent) if with_board else None
    return {
        "run": run.name,
        "state": final_state(run) or chief.state,
        "strategy": spec.strategy_class,
        "script": config.get("script"),
        "generation": run.generation,
        "step": step,
        "steps_total": total,
        "eta_s": round((total - step) * batch / rate, 1) if total and rate and not summary else None,
        "examples_per_s": rate,
        "checkpoint": _checkpoint(run),
        "tensorboard": tensorboard.address(port) if port else None,
        "pace": stragglers.findings(paces),
        "left_out": sorted(membership.left_out(run)),
        "last_event": _last_event(run),
        "queued": "" if summary or _heard(beats) else registry.of(run).situation(run),
        "tasks": [beats[task.name].to_json() for task in spec.tasks if task.name in beats],
    }


def _queued(value: dict[str, Any]) -> list[str]:
    return [value["queued"]] if value.get("queued") else []


def _heard(beats: dict[str, Heartbeat]) -> bool:
    return any(beat.state not in (TaskState.LOST, *FINAL_STATES) for beat in beats.values())


def _checkpoint(run: RunFolder) -> dict[str, Any] | None:
    ledgers = (records.read(run.ledger(number), records.ledger, {}) for number in range(run.generation, -1, -1))
    for saved in reversed(run.saved_steps):
        with contextlib.suppress(FileNotFoundError):  # a newer one has just pushed it out
            age_s = time.time() - (run.checkpoints / f"ckpt-{saved}.json").stat().st_mtime
            return {"step": saved, "age_s": round(age_s, 1), "every_s": goodput.checkpoint_every_s(ledgers)}
    return None


def _last_event(run: RunFolder) -> dict[str, Any] | None:
    newest = max(run.events(), key=lambda event: event["time"], default=None)
    if newest is None:
        return None
    why = newest["detail"].get("cause") or newest["detail"].get("kind")
    return {name: newest[name] for name in ("time", "task", "event", "step")} | {"cause": why}


@plain_lines
def live_lines(value: dict[str, Any], losses: Sequence[float], width: int) -> list[str]:
    """Return a status as the lines of a screen that is redrawn: how far it is, then a row for each task.

    Args:
        value: the status.
        losses: the chief's, as they were seen so far.
        width: of the screen.
    """
    if value["script"]:
        return _script_table(value)
    _, *rows = status_table(value)
    loss = next((beat["loss"] for beat in value["tasks"] if beat["task"] == "chief"), None)
    head = progress(value | {"checkpoint": None, "tasks": []})
    lines = [f"{value['run']}  {value['state']}  {value['strategy']}"]
    if value["steps_total"]:
        share = value["step"] / value["steps_total"]
        head = f"{bar(share, max(8, min(30, width - len(head) - 9)))} {share:4.0%}  {head}"
    lines.append(head)
    if line := sparkline(losses, min(40, width - 16)):
        lines.append(f"loss   {line} {_number(loss, 4)}")
    if saved := value["checkpoint"]:
        every = f", every {saved['every_s']:.1f} s" if saved["every_s"] else ""
        lines.append(f"saved  step {saved['step']}, {saved['age_s']:.0f} s ago{every}")
    if event := value["last_event"]:
        why = f" ({event['cause']})" if event["cause"] else ""
        at = "" if event["step"] is None else f" at step {event['step']}"
        lines.append(f"last   {event['task']}: {event['event']}{why}{at}, {_since(event['time'])} ago")
    return [*lines, "", *rows]


def _since(moment: float) -> str:
    passed_s = max(0.0, time.time() - moment)
    return f"{passed_s:.0f} s" if passed_s < 120 else f"{passed_s / 60:.0f} min"


@plain_lines
def status_table(value: dict[str, Any]) -> list[str]:
    """Return a status as lines of text."""
    if value["script"]:
        return _script_table(value)
    head = f"{value['run']}  {value['state']}  {value['strategy']}  {progress(value)}"
    names = ("TASK", "STATE", "STEP", "EXAMPLES/S", "LOSS", "RESTARTS", "AGE", "MS/STEP", "BUSY", "INPUT")
    rows = [
        (
            beat["task"],
            beat["state"],
            beat["step"],
            _number(beat["examples_per_s"], 0),
            _number(beat["loss"], 4),
            beat["restarts"],
            _age(beat),
            _number((beat.get("step_ms") or {}).get("median"), 1),
            _share(beat.get("busy_share")),
            _share(beat.get("input_share")),
        )
        for beat in value["tasks"]
    ]
    lines = [head, *columns([names, *rows], right=range(2, len(names)))]
    return [*lines, *stragglers.lines(value["pace"])]


def _script_table(value: dict[str, Any]) -> list[str]:
    lines = [f"{value['run']}  {value['state']}  {value['script']}", *_queued(value)]
    names = ("TASK", "STATE", "EXIT CODE", "RESTARTS", "AGE")
    rows = []
    for beat in value["tasks"]:
        code = beat.get("exit_code")
        rows.append((beat["task"], beat["state"], "-" if code is None else code, beat["restarts"], _age(beat)))
    return [*lines, *columns([names, *rows], right=range(2, len(names)))]


def _age(beat: dict[str, Any]) -> str:
    return f"{time.time() - beat['updated_at']:.0f}s"


def progress(value: dict[str, Any]) -> str:
    """Return a status' progress in one line."""
    if value["script"]:
        return value.get("queued") or f"{value['script']} runs"
    total = f"/{value['steps_total']}" if value["steps_total"] else ""
    parts = [f"step {value['step']}{total}", *_queued(value)]
    if value.get("left_out"):
        parts.append(f"without {', '.join(value['left_out'])}")
    loss = next((beat["loss"] for beat in value["tasks"] if beat["task"] == "chief"), None)
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if value["examples_per_s"]:
        parts.append(f"{value['examples_per_s']:,.0f} examples/s")
    if value["eta_s"] is not None:
        parts.append(f"{value['eta_s']:.0f} s left")
    if value["checkpoint"]:
        every_s = value["checkpoint"]["every_s"]
        parts.append(f"checkpoint at {value['checkpoint']['step']}" + (f", every {every_s:.1f} s" if every_s else ""))
    return "  ".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
