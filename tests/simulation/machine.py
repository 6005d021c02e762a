"""Puts real agents into a simulated world: what they import of the system is replaced while it runs."""

from __future__ import annotations

import signal
import types
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

from cluster.agent import agent, attempt, elastic, rendezvous, run_view, watchdog
from cluster.agent import standby as standing_by
from cluster.agent.agent import Agent
from cluster.agent.rendezvous import Abandoned, Attendance, Incomplete
from cluster.agent.run_view import RunView
from cluster.agent.task_process import Script, TaskProcess, Trainer
from cluster.contract.recovery import ends, step_record
from cluster.contract.results import summary
from cluster.contract.run import joining
from cluster.contract.spec import ClusterSpec, Task
from tests.simulation import folder, standby
from tests.simulation.gang import SimRunView
from tests.simulation.program import SimProgram
from tests.simulation.world import Now, SimTask

POLL_S = 0.5
"""How often agents look, at most: five times less than on a real machine, so that a schedule takes less time."""
RENDEZVOUS_S = 60.0
DROPPED_SHARE = 0.2
"""How many connections of the rendezvous fail."""


class Clock:
    """Replaces the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return Now.world.now

    @staticmethod
    def time() -> float:
        return Now.world.time()

    @staticmethod
    def sleep(seconds: float) -> None:
        Now.world.sleep(seconds)


class NoKills:
    """Replaces `MemoryKills`: the kernel kills nothing."""

    def include(self, *_: Any) -> bool:
        return False


def make_agent(task: SimTask, *, scripted: bool, standby_s: float | None) -> Agent:
    """Return the agent of a task, whose programs are simulated; `standby_s` is that of `Drawn`."""
    kind: type[TaskProcess] = Script if scripted else Trainer
    made = Agent(SimRunView(task.world.folder, task), task.name, ["program"], RENDEZVOUS_S, kind=kind)
    made._program = lambda environment: SimProgram(task.world, task, environment)  # type: ignore[method-assign,assignment,return-value]
    made.standby._start = made._program
    made.standby._enabled = standby_s is not None
    made.standby._delay_s = standby_s or 0.0
    return made


def hold_rendezvous(
    spec: ClusterSpec,
    task: Task,
    view: RunView,
    generation: int,
    *,
    token: str,
    timeout_s: float,
    abandon: Callable[[], bool],
    passed: Callable[[], Collection[str]],
    patience: Callable[[Collection[str]], float],
    **_: Any,
) -> None:
    """Replace the rendezvous: a task with the same token answers unless it is frozen or the connection fails."""
    world, others = Now.world, frozenset(member.name for member in spec.members) - {task.name}
    if not others:
        return
    world.operation("begin the rendezvous")
    mine = Attendance(token, others, view, generation)
    if world.tasks[task.name] is world.running:  # others reach the newest copy
        world.meetings[task.name] = mine
    first, began = rendezvous.dialed_first(spec, task), world.now
    try:
        while True:
            due = mine.exchange(first, world.now - began, timeout_s)
            for name in sorted(due & mine.missing.keys()):
                theirs = world.meetings.get(name)
                answers = theirs and theirs.token == token and world.tasks[name].frozen_until <= world.now
                if theirs and answers and world.random.random() >= DROPPED_SHARE:
                    mine.missing.pop(name)
                    theirs.unconfirmed.discard(task.name)
            mine.mark_present(passed())
            missing = mine.absent
            if not missing:
                return
            if abandon():
                raise Abandoned("the rendezvous was abandoned")
            if world.now > began + patience(missing) and mine.gives_up(world.now):
                raise Incomplete(f"missing {sorted(missing)}", missing)
            world.sleep(POLL_S)
    finally:
        if world.meetings.get(task.name) is mine:
            del world.meetings[task.name]


def listen(task: Task, *, abandon: Callable[[], bool], **_: Any) -> Any:
    """Replace `rendezvous.open_task_listener`: the port becomes free after a moment."""
    Now.world.sleep(POLL_S / 5)
    if abandon():
        raise Abandoned("waiting for the port was abandoned")
    return types.SimpleNamespace(close=lambda: None)


def await_turn(task: Task, *, token: str, abandon: Callable[[], bool], **_: Any) -> None:
    Now.world.waiting[task.name] = token
    try:
        while not abandon():
            Now.world.sleep(POLL_S)
    finally:
        Now.world.waiting.pop(task.name, None)


def dial(task: Task, other: Task, token: str, timeout_s: float) -> str:
    world = Now.world
    answers = world.waiting.get(other.name) == token and world.tasks[other.name].frozen_until <= world.now
    return "" if answers and world.random.random() >= DROPPED_SHARE else "no answer"


def write_summary(run: folder.SimFolder, settle_s: float, outcome: Any) -> None:
    run.world.sleep(0.1)
    assert outcome
    run.records["summary"] = run.records["outcome"]


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace what agents use of the system by the simulated world, until the patch is undone."""
    signals = types.SimpleNamespace(**vars(signal) | {"signal": lambda *_: None})
    for module in (agent, attempt, run_view, elastic, watchdog, standing_by):
        patch.setattr(module, "time", Clock)
    for module in (agent, elastic):
        patch.setattr(module, "HeartbeatWriter", folder.SimHeartbeat)
    for module in (attempt, standing_by):
        patch.setattr(module, "MemoryKills", NoKills)
    for module in (agent, attempt):
        patch.setattr(module, "POLL_S", POLL_S)
    patch.setattr(agent, "signal", signals)
    patch.setattr(agent, "write_json", lambda *_: Now.world.operation("write"))
    patch.setattr(agent, "identity", lambda pid: {})
    patch.setattr(rendezvous, "open_task_listener", listen)
    patch.setattr(rendezvous, "await_servers", lambda *_, **__: True)
    patch.setattr(joining, "run_token", lambda run: "run")
    patch.setattr(rendezvous, "hold_rendezvous", hold_rendezvous)
    patch.setattr(rendezvous, "await_turn", await_turn)
    patch.setattr(rendezvous, "dial", dial)
    patch.setattr(elastic, "Returns", partial(elastic.Returns, clock=Clock.monotonic))
    patch.setattr(summary, "write_summary", write_summary)
    patch.setattr(ends, "record_end", folder.record_end)
    patch.setattr(ends, "recorded_end", folder.recorded_end)
    patch.setattr(ends, "recorded_ends", folder.recorded_ends)
    patch.setattr(ends, "ended_tasks", folder.ended_tasks)
    patch.setattr(step_record, "read_step", folder.read_progress)
    patch.setattr(watchdog.Watchdog, "hang_reported", property(lambda self: _hang(self) in self._run.folder.records))
    patch.setattr(
        watchdog.Watchdog, "report_hang", lambda self, finding: self._run.folder.records.update({_hang(self): {}})
    )
    patch.setattr(standing_by, "memory", standby.SimMemory)
    patch.setattr(standing_by.Standby, "_set_kill_score", lambda *_: None)
    standby.install(patch)
    patch.setenv("RESTART_PAUSE_S", "0.5")


def _hang(watching: watchdog.Watchdog) -> str:
    return f"hang-{watching._generation}"
