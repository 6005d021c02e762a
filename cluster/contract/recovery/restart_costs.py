"""The restarts of a run: their causes and costs."""

from collections.abc import Sequence
from typing import Any

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Event, Generation, Restart
from cluster.contract.spec import ClusterSpec, Role


def training_began(spec: ClusterSpec, events: list[Event]) -> float | None:
    """Return the time of the first finished step, or when the last task's script started; None before."""
    started: dict[str, float] = {}
    for event in events:
        if event.event == "first step":
            return float(event.time)
        if event.event == "script started":
            started.setdefault(event.task, event.time)
    return max(started.values()) if len(started) == len(spec.tasks) else None


def costs(run: RunFolder, started: float, roles: Sequence[Role] = (Role.WORKER,)) -> list[Restart]:
    """Return the cost of each restart since `started`: the time from the failure, and the repeated steps.

    A script reports no steps, so its only cost is the time until its process started again, `script_started_s`. Tasks
    that restart alone are included if they have one of `roles`; restarts of the gang always are.
    """
    events = [event for event in run.events() if event.time >= started]
    spec, scripted = run.load_cluster(), run.script is not None
    restarts = [(g.time, _gang_cost(spec, scripted, g, events)) for g in run.generations() if g.task and g.cause]
    names = {task.name for task in spec.tasks if task.role in roles}
    restarts += [
        (event.time, _lone_cost(scripted, event, events, events[at + 1 :]))
        for at, event in enumerate(events)
        if event.event == "restarted" and event.task in names
    ]
    return [cost for moment, cost in sorted(restarts, key=lambda entry: entry[0]) if moment > started]


def failures(run: RunFolder, started: float) -> dict[int, float]:
    """Return the time of each failure since `started`, keyed by the generation that began because of it."""
    events = [event for event in run.events() if event.time >= started]
    begun = [each for each in run.generations() if each.task and each.cause and each.time > started]
    return {each.generation: _failed_at(each, events) for each in begun}


def _gang_cost(spec: ClusterSpec, scripted: bool, generation: Generation, events: list[Event]) -> Restart:
    number = generation.generation
    later = [e for e in events if e.generation == number and e.time >= generation.time]
    failed_at = _failed_at(generation, events)
    began = next((e for e in later if e.event in ("restored", "initialized")), None)
    restored = began.step if began else None
    # A generation that failed before its first step reports none.
    before = [e.step or 0 for e in events if (e.generation, e.event) == (number - 1, "restored")]
    done = max(generation.step, *before, 0)
    return Restart(
        generation=number,
        task=generation.task or "",
        cause=": ".join(filter(None, (generation.cause, generation.error))),
        detected_s=round(generation.time - failed_at, 3),
        steps_lost=None if restored is None else max(0, done - restored),
        restored_from=str(began.detail.get("source", "")) if began else "",
        **_resumption(scripted, failed_at, training_began(spec, later)),
    )


def _failed_at(generation: Generation, events: list[Event]) -> float:
    return _injected(events, generation.generation - 1, generation.time) or generation.failure_time


def _resumption(scripted: bool, failed_at: float, resumed_at: float | None) -> dict[str, Any]:
    after_s = None if resumed_at is None else round(resumed_at - failed_at, 3)
    return {"script_started_s" if scripted else "resumed_s": after_s}


def _injected(events: list[Event], generation: int, until: float, task: str = "") -> float | None:
    """Return the time at which the fault behind a restart was injected, before any agent noticed; None if none was."""
    time = None
    for event in events:
        if event.generation != generation or event.time >= until or task not in ("", event.task):
            continue
        if event.event == "fault" and event.detail.get("kind") != "slow":
            time = event.time
        elif event.event == "restarted":
            time = None  # an earlier restart was already due to this fault
    return time


def _lone_cost(scripted: bool, event: Event, events: list[Event], later: list[Event]) -> Restart:
    """Return the cost of a separate restart of one task. It repeats no steps, since the other tasks continue."""
    failed_at = _injected(events, event.generation, event.time, event.task) or event.detail.get("failed_at", event.time)
    resumed = ("resumed", event.task, event.generation)
    resumed_at = next((e.time for e in later if (e.event, e.task, e.generation) == resumed), None)
    return Restart(
        generation=event.generation,
        task=event.task,
        cause=event.detail.get("cause") or "",
        detected_s=round(event.time - failed_at, 3),
        steps_lost=None if scripted else 0,
        **_resumption(scripted, failed_at, resumed_at),
    )
