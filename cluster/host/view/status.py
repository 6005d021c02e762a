"""The status of a run, for `--json` and as a table, and its result."""

import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any

from cluster.contract.results import goodput, late_tasks, reference, stragglers
from cluster.contract.run import membership, records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.heartbeat import HEARTBEAT_S, final_state, read_live_heartbeats
from cluster.contract.run.logs import last_line
from cluster.contract.run.records import FINAL_STATES, Cause, Heartbeat, Paces, Summary, TaskState, TimeLedger
from cluster.host.runtime import mirror, registry, tensorboard
from cluster.host.view.columns import MIN_ROOM, cell, chosen_columns, columns, plain_lines, sparkline
from cluster.system.messages import COMMAND, counted, plain, short_path, shortened
from cluster.system.processes import describe_exit
from cluster.system.terminal import WIDE, fit, terminal_width

METRIC = re.compile(r"(\w+): (-?\d+(?:\.\d+)?(?:e[+-]\d+)?)(?!\S)")
"""A metric in Keras's progress, such as `val_loss: 0.4321`."""
_STATE = f"{'STATE':<{max(map(len, TaskState))}}"
"""The heading, as wide as the longest state, so that columns do not move when a state changes."""
_NAMES = ("TASK", _STATE, "STEP", "EXAMPLES/S", "LOSS", "RESTARTS", "AGE", "MS/STEP", "BUSY", "INPUT")
_SPARE = ("AGE", "INPUT", "BUSY", "MS/STEP", "RESTARTS", "EXAMPLES/S")
SHOWN_CHANGES = 5


def read_status(
    run: RunFolder, beats: dict[str, Heartbeat] | None = None, *, with_board: bool = True
) -> dict[str, Any]:
    """Return the run's status, the output of `invoke status --json`; raise DamagedError without valid run records.

    `beats` are the heartbeats of a watcher, with the state `lost` for silent tasks; by default they are read here. With
    `with_board`, the status has TensorBoard's address, which may require a call of the engine.
    """
    spec, config = run.load_cluster(), run.load_config()
    beats = read_live_heartbeats(run) if beats is None else beats
    summary = run.load_summary()
    paces = {name: beat.recent_pace for name, beat in beats.items() if beat.state == TaskState.TRAINING}
    chief = beats.get("chief") or Heartbeat(task="chief", state=TaskState.STARTING, updated_at=0.0)
    step, total, rate = chief.step, chief.steps_total, chief.examples_per_s
    batch = config.get("global_batch", 0)
    port = tensorboard.running_port(run.path.parent) if with_board else None
    script = config.get("script")
    silent = [name for name, beat in beats.items() if time.time() - beat.updated_at > 5 * HEARTBEAT_S]
    late, text = late_tasks.find_late(spec, beats, run.generation, silent)
    reporting = any(beat.state not in (TaskState.LOST, *FINAL_STATES) for beat in beats.values())
    last_event: dict[str, Any] | None = None
    if newest := max(run.events(), key=lambda event: event.time, default=None):
        why = newest.detail.get("cause") or newest.detail.get("kind")
        last_event = {name: getattr(newest, name) for name in ("time", "task", "event", "step")} | {"cause": why}
    printed: dict[str, Any] = {}
    if script:
        lines = {task.name: last_line(run.log(task.name)) for task in spec.tasks}
        printed = {"printed": lines, "metrics": {name: _logged_metrics(line) for name, line in lines.items()}}
    return {
        "run": run.name,
        "state": final_state(run) or chief.state,
        "strategy": spec.strategy_class,
        "script": script,
        **printed,
        "generation": run.generation,
        "step": step,
        "steps_total": total,
        "eta_s": round((total - step) * batch / rate, 1) if total and rate and not summary else None,
        "examples_per_s": rate,
        "checkpoint": _checkpoint(run),
        "tensorboard": tensorboard.address(port) if port else None,
        "mirror": mirror.describe_mirror(run) or None,
        "pace": stragglers.findings(paces).to_json(),
        "late": text if late else None,
        "left_out": sorted(membership.left_out(run)),
        "last_event": last_event,
        "queued": "" if summary or reporting else registry.find_runtime(run).scheduler_status(run),
        "tasks": [beats[task.name].to_json() for task in spec.tasks if task.name in beats],
    }


def _logged_metrics(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in METRIC.findall(line)} if "loss: " in line else {}


def chief_loss(value: dict[str, Any]) -> float | None:
    """Return the loss in the chief's heartbeat."""
    return next((beat["loss"] for beat in value["tasks"] if beat["task"] == "chief"), None)


def _checkpoint(run: RunFolder) -> dict[str, Any] | None:
    paths = (run.ledger(number) for number in range(run.generation, -1, -1))
    read = (records.read_record(path, TimeLedger.from_json, None) for path in paths)
    ledgers = (ledger for ledger in read if ledger)
    for saved in reversed(run.saved_steps):
        with contextlib.suppress(FileNotFoundError):  # just deleted in favour of a newer one
            age_s = time.time() - (run.checkpoints / f"ckpt-{saved}.json").stat().st_mtime
            return {"step": saved, "age_s": round(age_s, 1), "every_s": goodput.checkpoint_every_s(ledgers)}
    return None


@plain_lines
def live_lines(value: dict[str, Any], losses: Sequence[float], width: int) -> list[str]:
    """Format a status and the chief's losses for the live view: the progress, then a row for each task."""
    if value["script"]:
        return _script_table(value)
    head = progress(value | {"checkpoint": None, "tasks": []})
    lines = [_head(value)]
    if value["steps_total"]:
        share = value["step"] / value["steps_total"]
        room = max(8, min(30, width - len(head) - 9))
        full = round(min(1.0, max(0.0, share)) * room)
        head = f"{'█' * full}{'░' * (room - full)} {share:4.0%}  {head}"
    lines.append(head)
    if line := sparkline(losses, min(40, width - 16)):
        lines.append(f"loss   {line} {cell(chief_loss(value), '{:,.4f}')}")
    lines += _saved(value)
    if event := value["last_event"]:
        why = f" ({event['cause']})" if event["cause"] else ""
        at = "" if event["step"] is None else f" at step {event['step']}"
        ago = _passed(max(0.0, time.time() - event["time"]))
        lines.append(f"last   {event['task']}: {event['event']}{why}{at}, {ago} ago")
    return [*fit(lines, width), "", *_task_table(value, width)]


def _head(value: dict[str, Any]) -> str:
    return f"{value['run']}  {value['state']}  {value['strategy']}"


def _saved(value: dict[str, Any]) -> list[str]:
    mirrored = [f"mirror {value['mirror']}"] if value.get("mirror") else []
    if not (saved := value["checkpoint"]):
        return mirrored
    every = f", every {saved['every_s']:.1f} s" if saved["every_s"] else ""
    return [f"saved  step {saved['step']}, {_passed(saved['age_s'])} ago{every}", *mirrored]


def _passed(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@plain_lines
def status_table(value: dict[str, Any]) -> list[str]:
    """Format a status as lines of text."""
    if value["script"]:
        return _script_table(value)
    return [_head(value), progress(value | {"checkpoint": None}), *_saved(value), *_task_table(value)]


def _task_table(value: dict[str, Any], width: int | None = None) -> list[str]:
    rows = [
        (
            beat["task"],
            beat["state"],
            beat["step"],
            cell(beat["examples_per_s"], "{:,.0f}"),
            cell(beat["loss"], "{:,.4f}"),
            beat["restarts"],
            _age(beat),
            cell((beat.get("step_ms") or {}).get("median"), "{:,.1f}"),
            _share(beat.get("busy_share")),
            _share(beat.get("input_share")),
        )
        for beat in value["tasks"]
    ]
    lines = chosen_columns(_NAMES, rows, right=_NAMES[2:], spare=_SPARE, width=width)
    return [*lines, *filter(None, [value["late"]]), *stragglers.lines(Paces.from_json(value["pace"]))]


def _script_table(value: dict[str, Any]) -> list[str]:
    lines = [f"{value['run']}  {value['state']}  {value['script']}", *filter(None, [value.get("queued")])]
    names = ("TASK", "STATE", "EXIT CODE", "RESTARTS", "AGE")
    tasks = value["tasks"]
    rows = [(each["task"], each["state"], cell(each.get("exit_code")), each["restarts"], _age(each)) for each in tasks]
    lines += columns([names, *rows], right=range(2, len(names)))
    # The newest line of each task. A long line keeps its end, where progress bars have their figures.
    printed = value.get("printed", {})
    room = terminal_width() - max(map(len, printed), default=0) - 2
    newest = [(name, shortened(plain(line), max(room, MIN_ROOM))) for name, line in printed.items() if line]
    return [*lines, *(["", *columns(newest, width=WIDE)] if newest else [])]


def _age(beat: dict[str, Any]) -> str:
    return f"{time.time() - beat['updated_at']:.0f}s"


def progress(value: dict[str, Any]) -> str:
    """Format the progress in a status as one line."""
    if value["script"]:
        return value.get("queued") or f"{value['script']} runs"
    total = f"/{value['steps_total']}" if value["steps_total"] else ""
    parts = [f"step {value['step']}{total}", *filter(None, [value.get("queued")])]
    if value.get("left_out"):
        parts.append(f"without {', '.join(value['left_out'])}")
    if (loss := chief_loss(value)) is not None:
        parts.append(f"loss {loss:.4f}")
    if value["examples_per_s"]:
        parts.append(f"{value['examples_per_s']:,.0f} examples/s")
    if value["eta_s"] is not None:
        parts.append(f"{_passed(value['eta_s'])} left")
    if value["checkpoint"]:
        parts.append(f"checkpoint at {value['checkpoint']['step']}")
    return "  ".join(parts)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


@plain_lines
def ended_lines(run: RunFolder) -> list[str]:
    """Return the final lines about a run with a summary: its result, its folder, and the next commands."""
    summary = records.read_record(run.summary, Summary.from_json)
    port, shown_path = tensorboard.running_port(run.path.parent), short_path(run.path)
    if summary.state == "failed":
        lines = _failure(run, summary)
    else:
        found = summary.score
        score_text = f", {found[0]} {found[1]:.4f} on the test set" if found else ""
        restarts = f", {counted(len(summary.restarts), 'restart')}" if summary.restarts else ""
        start = f" (start {summary.startup_s:.1f} s)" if summary.startup_s else ""
        work = counted(summary.steps, "step")
        if run.script:
            cluster = run.load_cluster()
            serves = any(cluster.serves(task) for task in cluster.tasks)
            work = "the chief's script ended" if serves and summary.state != "stopped" else "every task's script ended"
            work += "" if summary.state == "stopped" else " with 0"
        lines = [f"{summary.state}: {work} in {summary.wall_s:.1f} s{start}{score_text}{restarts}"]
    lines += [f"tasks        {change}" for change in summary.membership[-SHOWN_CHANGES:]]
    if summary.goodput_split:
        lines += [f"time         {goodput.line(summary.goodput_split)}"]
    if every_s := summary.checkpoint_every_s:
        lines += [f"checkpoints  every {every_s:.1f} s"]
    lines += [f"pace         {found}" for found in stragglers.lines(summary.pace)]
    lines += [*reference.fault_lines(run), f"run folder   {shown_path}"]
    if mirrored := mirror.describe_mirror(run):
        lines += [f"mirror       {mirrored}"]
    if run.script:
        lines += [f"its files    {shown_path}/work/TASK"]
    if port:
        lines += [f"TensorBoard  {tensorboard.address(port)}"]
    first, *rest = _next_commands(run, summary)
    return [*lines, f"next         {first}", *(f"{'':13}{line}" for line in rest)]


def _next_commands(run: RunFolder, summary: Summary) -> list[str]:
    """Return hints about the next commands; a long command is on a separate line, for copying."""
    resume = f"{COMMAND} up --resume {run.name}"
    if summary.state == "stopped":
        return [resume]
    if summary.state == "failed":
        return ["fix the cause, then:", resume]
    if run.script:
        return [f"{COMMAND} down (ends TensorBoard)"]
    config = run.load_config()
    epochs, most = config.get("epochs", 3), config.get("max_steps")
    doubled = [f"--max-steps {2 * most}"] if most else []
    if not most or 2 * (summary.epochs or 0) > epochs:  # otherwise the epochs would end it before these steps
        doubled = [f"--epochs {2 * epochs:g}", *doubled]
    return [f"{COMMAND} down (ends TensorBoard), or train on:", f"{resume} -- {' '.join(doubled)}"]


def _failure(run: RunFolder, summary: Summary) -> list[str]:
    cause = summary.failure or Cause()
    after = f"{summary.wall_s:.1f} s" if run.script else counted(summary.steps, "step")
    inside = [f"run {run.name} failed after {after}"]
    for name, code in summary.tasks.items():
        if name != cause.task and code:
            inside.append(f"{name}: {describe_exit(code)}, ended as a consequence")
    inside += [f"restart {each.generation}: {each.task}, {each.cause}" for each in summary.restarts]
    at = time.strftime("%H:%M:%S", time.localtime(cause.time))
    how = describe_exit(cause.exit_code) if cause.exit_code and cause.task and not run.script else ""
    how = "" if str(cause.error).startswith(how) else f", {how}"
    inside.append(f"root cause: {cause.task or 'the run'} at {at}{how}: {cause.error}")
    if cause.task:
        inside.append(f"its log: {COMMAND} logs {cause.task}")
    rule = "-" * min(100, terminal_width(), max(len(line) for line in inside))
    return [rule, *inside, rule]
