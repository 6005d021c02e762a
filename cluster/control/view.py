"""What a run looks like in a terminal: its status, its live view, and how it ended."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from cluster.control.columns import columns
from cluster.messages import counted, plain
from cluster.results import goodput, reference, stragglers
from cluster.run import records
from cluster.run.folder import RunFolder
from cluster.run.liveness import look_once
from cluster.run.logs import Reader
from cluster.runtime import tensorboard
from cluster.system.processes import describe_exit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live as Screen

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def harmless(text: str) -> str:
    """Return a line that somebody's program printed, with its colours and tabs, but nothing that steers a terminal."""
    parts = _COLOUR.split(text)
    return "".join(part if at % 2 else "\t".join(map(plain, part.split("\t"))) for at, part in enumerate(parts)) + (
        "\x1b[m" if len(parts) > 1 else ""
    )


P = ParamSpec("P")


def _plain(lines: Callable[P, list[str]]) -> Callable[P, list[str]]:
    """Have the lines of a function made harmless: run folders hold what the tasks' programs wrote."""

    @functools.wraps(lines)
    def wrapped(*arguments: P.args, **options: P.kwargs) -> list[str]:
        return [plain(line) for line in lines(*arguments, **options)]

    return wrapped


def status(
    run: RunFolder, beats: dict[str, dict[str, Any]] | None = None, *, with_board: bool = True
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
    chief = beats.get("chief", {})
    step, total, rate = chief.get("step", 0), chief.get("steps_total"), chief.get("examples_per_s")
    batch = config.get("global_batch", 0)
    port = tensorboard.running(run.path.parent) if with_board else None
    return {
        "run": run.name,
        "state": summary["state"] if summary else chief.get("state", "starting"),
        "strategy": spec.strategy_class,
        "script": config.get("script"),
        "generation": run.generation,
        "step": step,
        "steps_total": total,
        "eta_s": round((total - step) * batch / rate, 1) if total and rate and not summary else None,
        "examples_per_s": rate,
        "checkpoint": _checkpoint(run),
        "tensorboard": tensorboard.address(port) if port else None,
        "pace": stragglers.findings({name: beat for name, beat in beats.items() if beat["state"] == "training"}),
        "tasks": [beats[task.name] for task in spec.tasks if task.name in beats],
    }


def _checkpoint(run: RunFolder) -> dict[str, Any] | None:
    ledgers = (records.read(run.ledger(number), records.ledger, {}) for number in range(run.generation, -1, -1))
    for saved in reversed(run.saved_steps):
        with contextlib.suppress(FileNotFoundError):  # a newer one has just pushed it out
            age_s = time.time() - (run.checkpoints / f"ckpt-{saved}.json").stat().st_mtime
            return {"step": saved, "age_s": round(age_s, 1), "every_s": goodput.checkpoint_every_s(ledgers)}
    return None


@_plain
def table(value: dict[str, Any]) -> list[str]:
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
    lines = [f"{value['run']}  {value['state']}  {value['script']}"]
    names = ("TASK", "STATE", "EXIT CODE", "RESTARTS", "AGE")
    rows = []
    for beat in value["tasks"]:
        code = beat.get("exit_code")
        rows.append((beat["task"], beat["state"], "-" if code is None else code, beat["restarts"], _age(beat)))
    return [*lines, *columns([names, *rows], right=range(2, len(names)))]


def _age(beat: dict[str, Any]) -> str:
    return f"{time.time() - beat['updated_at']:.0f}s"


@_plain
def plan(value: dict[str, Any]) -> list[str]:
    """Return a plan as lines of text."""
    replicas = counted(value["replicas"], "replica")
    lines = [f"run {value['run']}: {value['strategy']}, {replicas}, runtime {value['runtime']}"]
    if value["global_batch"] is None:
        lines.append(f"script {' '.join([value['config']['script'], *value['config']['arguments']])}")
    else:
        parts = f", in micro-batches of {value['micro_batch']}" if value["micro_batches"] > 1 else ""
        lines.append(f"global batch {value['global_batch']}: {value['replica_batch']} a replica and step{parts}")
    if training := value.get("training"):
        lines.append(_numerics(training, value["global_batch"]))
    if pipeline := value.get("pipeline"):
        lines += _stages(pipeline)
    given = [f"GPU {','.join(map(str, ids))}" if (ids := task.get("gpus")) else "no GPU" for task in value["tasks"]]
    rows = [
        (
            task["task"],
            task["address"],
            *([gpus] if set(given) != {"no GPU"} else []),
            json.dumps(task["tf_config"]) if task["tf_config"] else "no TF_CONFIG: it trains alone",
        )
        for task, gpus in zip(value["tasks"], given, strict=True)
    ]
    lines += columns(rows)
    return [*lines, *value.get("notes", [])]


def _stages(pipeline: dict[str, Any]) -> list[str]:
    """Return the stages of a pipeline, a line each, after what they have in common."""
    remat = ", activations computed again" if pipeline["remat"] else ""
    limit = f"{pipeline['memory_bytes'] / 1e6:,.0f} MB a stage" if pipeline["memory_bytes"] else "any memory"
    head = (
        f"pipeline {pipeline['schedule']}, {pipeline['micro_batches']} micro-batches{remat}: stages of equal time "
        f"would idle {pipeline['bubble']:.0%}; the cut is limited by {pipeline['limited_by']} ({limit})"
    )
    by = "FLOPS" if pipeline["partition_by"] == "flops" else "MS/MICRO-BATCH"
    names = ("STAGE", "PARAMETERS", "STATE MB", "MB/MICRO-BATCH", "HELD", "HELD MB", "TIME", by, "LAYERS")
    rows = [
        (
            stage["stage"],
            f"{stage['parameters']:,}",
            f"{stage['state_bytes'] / 1e6:,.1f}",
            f"{stage['micro_batch_bytes'] / 1e6:,.1f}",
            stage["in_flight"],
            f"{stage['activation_bytes'] / 1e6:,.1f}",
            f"{stage['share']:.0%}",
            f"{stage['cost']:.3g}" if by == "FLOPS" else f"{stage['cost'] * 1000:,.1f}",
            f"{stage['first']} to {stage['last']}",
        )
        for stage in pipeline["stages"]
    ]
    return [head, *columns([names, *rows], right=range(len(names) - 1))]


def _numerics(training: dict[str, Any], batch: int) -> str:
    """Return in which precision is trained, and how gradients become updates, in one line."""
    rate = f"learning rate {training['learning_rate']:g}"
    if training["scaling"] != "none":
        ratio = f"{batch}/{training['base_batch']}"
        by = f"sqrt({ratio})" if training["scaling"] == "sqrt" else ratio
        rate += f" ({training['scaling']}: {training['base_learning_rate']:g} x {by})"
    warm = f"after {counted(training['warmup_steps'], 'step')} of warm-up" if training["warmup_steps"] else "at once"
    clip = f"clipped to norm {training['clip_norm']:g}" if training["clip_norm"] else "not clipped"
    return f"precision {training['precision']}, {training['optimizer']}, {rate} {warm}, gradients {clip}"


@_plain
def findings(value: dict[str, Any]) -> list[str]:
    """Return what the doctor found as lines of text."""
    return columns(
        (found["state"], found["check"], "; ".join(filter(None, (found["detail"], found["fix"]))))
        for found in value["findings"]
    )


def progress(value: dict[str, Any]) -> str:
    """Return a status' progress in one line."""
    if value["script"]:
        return f"{value['script']} runs"
    total = f"/{value['steps_total']}" if value["steps_total"] else ""
    parts = [f"step {value['step']}{total}"]
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


class Live:
    """Shows a run while it trains: a table that redraws itself in a terminal, otherwise a line when there is news.

    What is drawn goes with the end of the `with` block, or with `clear`, so that a line can follow.
    """

    LINE_EVERY_S = 5.0

    def __init__(self) -> None:
        self._console: Console | None = None
        self._screen: Screen | None = None
        self._states: dict[str, str] = {}
        self._line = ""
        self._told_at = 0.0
        if sys.stdout.isatty():
            from rich.console import Console

            console = Console()
            self._console = None if console.is_dumb_terminal else console

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, value: dict[str, Any]) -> None:
        """Show the newest status."""
        if self._console:
            self._draw(self._console, table(value))
            return
        states = {beat["task"]: beat["state"] for beat in value["tasks"]}
        settled = {name: state for name, state in states.items() if state not in ("saving", "evaluating")}
        if any(self._states.get(name) != state for name, state in settled.items()):
            print(plain("  ".join(f"{name} {state}" for name, state in states.items())), flush=True)
            self._states |= settled
        if value["step"] and time.monotonic() - self._told_at > self.LINE_EVERY_S:
            if (line := plain(progress(value))) != self._line:
                print(line, flush=True)
            self._line, self._told_at = line, time.monotonic()
        sys.stdout.flush()

    def _draw(self, console: Console, lines: list[str]) -> None:
        from rich.live import Live as Screen
        from rich.text import Text

        if self._screen is None:
            # Nothing else is redirected: commands that run meanwhile print by themselves.
            self._screen = Screen(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._screen.start()
        self._screen.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

    def clear(self) -> None:
        """Take the table off the terminal."""
        if self._screen:
            self._screen.stop()
            self._screen = None


@_plain
def ended(run: RunFolder, shown_path: str) -> list[str]:
    """Return the last lines of a run that has a summary: how it ended, where it is, what to do next."""
    summary = records.read(run.summary, records.summary)
    port = tensorboard.running(run.path.parent)
    lines = []
    if summary["state"] == "failed":
        lines += _failure(run, summary)
    else:
        accuracy = summary["metrics"].get("eval_accuracy")
        accuracy_text = f", accuracy {accuracy:.4f} on the test set" if accuracy is not None else ""
        restarts = f", {counted(len(summary['restarts']), 'restart')}" if summary["restarts"] else ""
        start = f" (start {summary['startup_s']:.1f} s)" if summary["startup_s"] else ""
        work = _script_end(run, summary) if run.script else counted(summary["steps"], "step")
        lines += [f"{summary['state']}: {work} in {summary['wall_s']:.1f} s{start}{accuracy_text}{restarts}"]
    if summary.get("goodput_split"):
        lines += [f"time         {goodput.line(summary['goodput_split'])}"]
    if every_s := summary.get("checkpoint_every_s"):
        lines += [f"checkpoints  every {every_s:.1f} s"]
    lines += [f"pace         {found}" for found in stragglers.lines(summary.get("pace", {}))]
    lines += [*reference.fault_lines(run), f"run folder   {shown_path}"]
    if run.script:
        lines += [f"its files    {shown_path}/work/TASK"]
    if port:
        lines += [f"TensorBoard  {tensorboard.address(port)}"]
    further = f"invoke up --resume {run.name}"
    more = "" if run.script else f", or train on: {further} -- {_longer(run.load_config())}"
    after = {
        "succeeded": "invoke down (ends TensorBoard)" + more,
        "stopped": further,
        "failed": f"mend the cause, then {further}",
    }
    return [*lines, f"next         {after[summary['state']]}"]


def _longer(config: dict[str, Any]) -> str:
    """Return the option with which a training that came to its end goes on as long again."""
    if most := config.get("max_steps"):
        return f"--max-steps {2 * most}"
    return f"--epochs {2 * config.get('epochs', 3):g}"


def logs(run: RunFolder, names: list[str], follow: bool) -> None:
    """Print what some tasks' programs printed, each line behind its task's name where there are several.

    In a terminal their colours are kept, and nothing else that would steer it; another program gets what they printed.
    """
    terminal = sys.stdout.isatty()
    width = max(len(name) for name in names)
    readers = {name: Reader(run.log(name)) for name in names}
    while True:
        ended = not follow or run.ended is not None  # before reading: what was printed until then is still shown
        for name, reader in readers.items():
            for printed in reader.lines(ended=ended):
                for line in printed.decode(errors="replace").splitlines() or [""]:
                    shown = harmless(line) if terminal else line
                    print(f"{name:<{width}} | {shown}" if len(names) > 1 else shown)
        sys.stdout.flush()
        if ended:
            return
        time.sleep(0.2)


def _script_end(run: RunFolder, summary: dict[str, Any]) -> str:
    """Return how a run of a script ended well."""
    if summary["state"] == "stopped":
        return "every task's script ended"
    spec = run.load_cluster()
    serves = any(spec.serves(task) for task in spec.tasks)
    return "the chief's script ended with 0" if serves else "every task's script ended with 0"


def _failure(run: RunFolder, summary: dict[str, Any]) -> list[str]:
    """Return the failures in a box, the root cause last."""
    cause = summary["cause"]
    after = f"{summary['wall_s']:.1f} s" if run.script else counted(summary["steps"], "step")
    inside = [f"run {run.name} failed after {after}"]
    for name, code in summary["tasks"].items():
        if name != cause["task"] and code:
            inside.append(f"{name}: {describe_exit(code)}, ended because of the other")
    for restart in summary["restarts"]:
        inside.append(f"restart {restart['generation']}: {restart['task']}, {restart['cause']}")
    at = time.strftime("%H:%M:%S", time.localtime(cause["time"]))
    how = describe_exit(cause["exit_code"]) if cause["exit_code"] and cause["task"] and not run.script else ""
    how = "" if str(cause["error"]).startswith(how) else f", {how}"
    inside.append(f"root cause: {cause['task'] or 'the run'} at {at}{how}: {cause['error']}")
    if cause["task"]:
        inside.append(f"its log: invoke logs {cause['task']}")
    rule = "-" * min(100, max(len(line) for line in inside))
    return [rule, *inside, rule]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
