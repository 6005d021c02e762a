"""The summary of a run, computed from its tasks' records, and its card.

The card, `README.md` in the run's folder, has the configuration, the result, and commands to run it again.
"""

import contextlib
import time
from dataclasses import replace

from cluster.contract.recovery import restart_costs
from cluster.contract.results import goodput, stragglers
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Cause, Outcome, OutcomeState, Summary
from cluster.system.files import write_text
from cluster.system.json_files import write_json
from cluster.system.messages import COMMAND, counted, plain
from cluster.system.waiting import wait_until

SETTLE_S = 20.0
"""Timeout for the other tasks' last heartbeats, which a permanently lost task never writes."""
SHOWN_OPTIONS = ("preset", "model", "dataset", "loop", "global_batch", "epochs", "max_steps", "seed", "precision")
MAX_RESTARTS = 20


def write_summary(run: RunFolder, settle_s: float = SETTLE_S, outcome: Outcome | None = None) -> Summary:
    """Write the summary and the card of a run with this outcome, by default the recorded one; return the summary."""
    outcome = outcome or run.outcome
    assert outcome is not None
    spec = run.load_cluster()
    await_last_heartbeats(run, settle_s)
    names, present = [task.name for task in spec.tasks], membership.cluster(run)
    beats = run.heartbeats()
    result, ledgers = run.result, run.ledgers()
    started = start_time(run)
    wall_s = max(0.0, outcome.time - started)  # tasks' clocks may be ahead
    began = restart_costs.training_began(spec, [event for event in run.events() if event.time > started])
    members = [task.name for task in present.tasks]
    paces = {name: pace for name in members if name in beats and (pace := beats[name].pace)}
    cause = Cause(**{key: getattr(outcome, key) for key in ("task", "exit_code", "step", "error", "time")})
    parts = goodput.split(started, outcome.time, ledgers, restart_costs.failures(run, started))
    value = Summary(
        state=outcome.state,
        strategy=spec.strategy_class,
        replicas=present.replicas,
        steps=run.newest_step if result.steps is None else result.steps,
        epochs=result.epochs,
        startup_s=None if began is None else round(began - started, 3),
        wall_s=round(wall_s, 3),
        examples_per_s=result.examples_per_s,
        metrics=result.metrics,
        weights_sha256=result.weights_sha256,
        restarts=tuple(restart_costs.costs(run, started)),
        goodput=None if (useful := goodput.share(parts)) is None else round(useful, 3),
        goodput_split=parts,
        checkpoint_every_s=goodput.checkpoint_every_s(reversed(ledgers)),
        pace=replace(stragglers.findings(paces), tasks=paces),
        tasks={name: beats[name].exit_code if name in beats else None for name in names},
        cause=cause if outcome.state == OutcomeState.FAILED else None,
        membership=tuple(membership.changes(run)),
    )
    write_json(run.summary, value.to_json())
    with contextlib.suppress(OSError):  # only the summary is needed
        write_text(run.card, "\n".join(card_lines(run, value)) + "\n")
    return value


def start_time(run: RunFolder) -> float:
    """Return the start time of the run or, if unknown, of its newest generation."""
    begun = [generation.time for generation in run.generations()]
    started = run.started.time
    return (begun[-1] if begun else time.time()) if started is None else started


def await_last_heartbeats(run: RunFolder, timeout_s: float) -> None:
    """Wait until every task's agent has written its last heartbeat, for at most `timeout_s`."""
    names = [task.name for task in membership.cluster(run).tasks]

    def written() -> bool:
        beats = run.heartbeats()
        return all(name in beats and beats[name].ended for name in names)

    wait_until(written, timeout_s)


def card_lines(run: RunFolder, summary: Summary) -> list[str]:
    """Return the lines of a run's card. Values from the run folder are formatted as code and cannot inject Markdown."""
    return [
        f"# {code(run.name)}: {summary.state}",
        "",
        *_result(summary),
        "",
        "## What ran",
        "",
        *_settings(run, summary),
        "",
        *_restarts(summary),
        "## Next",
        "",
        *_next_commands(run, summary),
    ]


def code(value: object) -> str:
    """Format a value as Markdown code on one line, without characters that would end the code or a table cell."""
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


def _settings(run: RunFolder, summary: Summary) -> list[str]:
    config, commit = run.load_config({}), run.load_manifest({}).get("code", {}).get("commit")
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
    return ["## Restarts", "", "| generation | task | cause | steps lost |", "|---|---|---|---|", *rows, ""]


def _next_commands(run: RunFolder, summary: Summary) -> list[str]:
    """Return shell commands. A run's name needs no quoting."""
    if run.script:
        commands = {f"{COMMAND} logs --run {run.name}": "what the script printed"}
    else:
        commands = {f"{COMMAND} report {run.name}": "one page: curves, restarts, configuration"}
    if summary.state != "succeeded":
        commands[f"{COMMAND} up --resume {run.name}"] = "continue from the newest checkpoint"
    elif not run.script:
        commands[f"{COMMAND} rerun {run.name}"] = "the same training once more, compared with this one"
        commands[f"{COMMAND} evaluate {run.name}"] = "the newest checkpoint on the test set"
    width = max(map(len, commands))
    return ["```console", *(f"$ {command:<{width}}  # {what}" for command, what in commands.items()), "```"]
