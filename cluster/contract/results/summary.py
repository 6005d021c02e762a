"""The summary of a run, computed from what its tasks recorded."""

import contextlib
import time
from dataclasses import replace

from cluster.contract.recovery import restart_costs
from cluster.contract.results import card, goodput, stragglers
from cluster.contract.run import membership
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Outcome, OutcomeState
from cluster.contract.run.summary_records import Cause, Summary
from cluster.system.files import write_text
from cluster.system.json_files import write_json
from cluster.system.waiting import wait_until

SETTLE_S = 20.0
"""How long to wait for the other tasks' last heartbeats; a task that was killed for good never sends one."""


def write_summary(run: RunFolder, settle_s: float = SETTLE_S, outcome: Outcome | None = None) -> Summary:
    """Write `summary.json` for a run that has an outcome, even if its folder does not show it yet; return it."""
    outcome = outcome or run.outcome
    assert outcome is not None
    spec = run.load_cluster()
    await_last_heartbeats(run, settle_s)
    names, present = [task.name for task in spec.tasks], membership.cluster(run)
    beats = run.heartbeats()
    result, ledgers = run.result, run.ledgers()
    started = start_time(run)
    wall_s = max(0.0, outcome.time - started)  # records of tasks may be from the future
    began = restart_costs.training_began(spec, [event for event in run.events() if event.time > started])
    members = [task.name for task in present.tasks]
    paces = {name: pace for name in members if name in beats and (pace := beats[name].pace)}
    cause = Cause(**{key: getattr(outcome, key) for key in ("task", "exit_code", "step", "error", "time")})
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
        goodput=_goodput(run, started, wall_s),
        goodput_split=goodput.split(started, outcome.time, ledgers, restart_costs.failures(run, started)),
        checkpoint_every_s=goodput.checkpoint_every_s(reversed(ledgers)),
        pace=replace(stragglers.findings(paces), tasks=paces),
        tasks={name: beats[name].exit_code if name in beats else None for name in names},
        cause=cause if outcome.state == OutcomeState.FAILED else None,
        membership=tuple(membership.changes(run)),
    )
    write_json(run.summary, value.to_json())
    with contextlib.suppress(OSError):  # only the summary is needed
        write_text(run.card, "\n".join(card.lines(run, value)) + "\n")
    return value


def start_time(run: RunFolder) -> float:
    """Return the time of the run's start, or if that is unknown, of its newest generation."""
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


def _goodput(run: RunFolder, started: float, wall_s: float) -> float | None:
    """Return the share of the wall time spent in useful steps, without start, saving and repeated steps."""
    batch = run.load_config({}).get("global_batch", 0)
    useful_s, before = 0.0, None
    for row in run.rows("chief"):
        if row["time"] >= started and row["examples_per_s"] and before is not None:
            useful_s += (row["step"] - before) * batch / row["examples_per_s"]
        before = row["step"]
    return round(min(1.0, useful_s / wall_s), 3) if useful_s and wall_s > 0 else None
