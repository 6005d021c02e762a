"""The card of a run, `README.md` in its folder: configuration, result, and commands to run it again.

Its reader may not escape it, so everything from the run's folder is written as code.
"""

import time

from cluster.contract.results import goodput
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.summary_records import Summary
from cluster.system.messages import COMMAND, counted, plain

SHOWN_OPTIONS = ("preset", "model", "dataset", "loop", "global_batch", "epochs", "max_steps", "seed", "precision")
MAX_RESTARTS = 20


def lines(run: RunFolder, summary: Summary) -> list[str]:
    """Return the card of a run with this summary."""
    return [
        f"# {code(run.name)}: {summary.state}",
        "",
        *_result(summary),
        "",
        "## What ran",
        "",
        *_made_of(run, summary),
        "",
        *_restarts(summary),
        "## Again",
        "",
        *_again(run, summary),
    ]


def code(value: object) -> str:
    """Return a value as code in Markdown, on one line, with nothing that ends the code or a table's cell."""
    text = plain(str(value)).replace("`", "'").replace("|", "\\|")[:200]
    return f"`{text}`" if text.strip() else "-"


def _result(summary: Summary) -> list[str]:
    metrics = {name: value for name, value in summary.metrics.items() if value is not None}
    strategy = f" under {code(summary.strategy)}" if summary.strategy else ""
    text = [f"{counted(summary.steps, 'step')} in {summary.wall_s:.1f} s{strategy}."]
    text += [f"- {code(name)}: {value:.4f}" for name, value in list(metrics.items())[:20]]
    text += [f"- weights: {code(summary.weights_sha256)} (sha256)"] if summary.weights_sha256 else []
    text += [f"- time: {goodput.line(summary.goodput_split)}"] if summary.goodput_split else []
    if cause := summary.failure:
        text.append(f"- failed: {code(cause.task or 'unknown')}, {code(cause.error or 'see logs/')}")
    return [text[0], "", *text[1:]] if text[1:] else text


def _made_of(run: RunFolder, summary: Summary) -> list[str]:
    config, manifest = run.load_config({}), run.load_manifest({})
    commit = manifest.get("code", {}).get("commit") if isinstance(manifest.get("code"), dict) else None
    started, optimizer = run.started.time, config.get("optimizer")
    settings = optimizer if isinstance(optimizer, dict) else {}
    rows = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)) if started else "",
        "commit": commit or "",
        "runtime": run.started.runtime,
        "tasks": ", ".join(summary.tasks),
        "script": " ".join([config.get("script", ""), *config.get("arguments", [])]).strip(),
        **{name: config.get(name, "") for name in SHOWN_OPTIONS},
        "optimizer": ", ".join(f"{name} {value}" for name, value in settings.items() if value),
    }
    return ["| | |", "|---|---|", *(f"| {name} | {code(value)} |" for name, value in rows.items() if value)]


def _restarts(summary: Summary) -> list[str]:
    if not summary.restarts:
        return []
    rows = [
        f"| {each.generation} | {code(each.task)} | {code(each.cause)} "
        f"| {'-' if each.steps_lost is None else each.steps_lost} |"
        for each in summary.restarts[:MAX_RESTARTS]
    ]
    head = ["## Restarts", "", "| generation | task | cause | steps lost |", "|---|---|---|---|"]
    return [*head, *rows, ""]


def _again(run: RunFolder, summary: Summary) -> list[str]:
    """Return commands for a shell; a run's name has nothing that a shell reads."""
    commands = {f"{COMMAND} rerun {run.name}": "the same training once more, compared with this one"}
    if not run.script:
        commands[f"{COMMAND} report {run.name}"] = "one page: curves, restarts, configuration"
    if summary.state != "succeeded":
        commands[f"{COMMAND} up --resume {run.name}"] = "continue from the newest checkpoint"
    elif not run.script:
        commands[f"{COMMAND} evaluate {run.name}"] = "the newest checkpoint on the test set"
    width = max(map(len, commands))
    return ["```console", *(f"$ {command:<{width}}  # {what}" for command, what in commands.items()), "```"]
