"""Protections of the agents taken out, one at a time: each yields schedules in which an invariant has to break.

Some schedules are also run as they are: without its mutation each holds what the test of it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.agent import agent, decide, elastic, watchdog
from cluster.agent.agent import Agent
from cluster.agent.attempt import Restarter
from cluster.agent.watchdog import Watchdog
from cluster.contract.recovery import attempt_limits, ends, standby_cluster
from tests.simulation import machine
from tests.simulation.drawn import FOREVER_S, Drawn
from tests.simulation.gang import SimCopy, SimRunView
from tests.simulation.schedule import Schedule
from tests.simulation.world import Now, World

SEEDS_OF_A_MUTATION = 600
"""Within so many schedules a missing protection has to show."""
Mutation = Callable[[pytest.MonkeyPatch], Iterator[Schedule]]


def replaced(target: object, name: str, by: Any, drawn: Drawn | None = None) -> Mutation:
    def mutate(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
        patch.setattr(target, name, by)
        return schedules(drawn=drawn)

    return mutate


def changed(change: Callable[[Schedule], object], drawn: Drawn | None = None) -> Mutation:
    return lambda patch: schedules(change, drawn)


def forgotten(drawn: Drawn | None = None, **values: Any) -> Mutation:
    """Return the mutation in which agents decide as if these facts had other values."""
    whole = decide.decide
    return replaced(decide, "decide", lambda facts: whole(replace(facts, **values)), drawn)


def token_without_generation(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """Tasks of different generations hold one rendezvous, without a hub."""
    whole = machine.hold_rendezvous

    def hold(*words: object, token: str, **options: object) -> None:
        whole(*words, token="run", **options)

    patch.setattr(agent.rendezvous, "hold_rendezvous", hold)
    return schedules(lambda schedule: setattr(schedule.world, "linked", False))


def news_of_earlier_generations(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """What the hub says of an earlier generation counts."""
    patch.setattr(SimRunView, "hub_is_current", property(lambda self: self._side is not None and self._side.fresh))
    patch.setattr(SimRunView, "absent", lambda self, number: self._news().absent)
    return schedules()


def listed_generations_only(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """An agent that comes back takes the listing's word for which generation is the newest."""
    report = Agent._report_own_death

    def report_as_listed(self: Agent) -> None:
        beat = self.run.heartbeat(self.task.name)
        if beat and beat.generation == self.run.generation:
            report(self)

    patch.setattr(Agent, "_report_own_death", report_as_listed)
    later = (26.0, "kill task", "worker-1", 0.0)
    return schedules(drawn=replace(STALE, scripted=True, faults=[*STALE.faults, later]))


def damaged_records_stay(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A record that a crash left empty counts as one that another agent has created."""

    def change(schedule: Schedule) -> None:
        schedule.world.LIMIT_S = 120.0
        schedule.drawn.torn_share = 0.3
        schedule.folder.__dict__["replaces_damaged"] = False

    return schedules(change)


def kills_count(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A program that was killed counts as one that failed by itself, and no failure is forgiven."""
    patch.setattr(ends, "classify_code", lambda code, *, out_of_memory: attempt_limits.PROGRAM_FAILURE)
    patch.setattr(attempt_limits, "restart_limits", lambda run: (0, attempt_limits.MAX_EXTERNAL_RESTARTS))
    return schedules()


def failures_do_not_count(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A program that fails by itself starts again without a limit."""
    patch.setattr(attempt_limits, "count_over_limit", lambda tried, *limits: 0)
    patch.setattr(attempt_limits, "pause_s", lambda tried: 0.0)
    return schedules()


def no_single_steps(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """After a program has failed, nobody records from where single steps are to be done."""
    whole = Restarter._failure
    patch.setattr(Restarter, "_failure", lambda *given: whole(*given) | {"single_steps_from": None})
    return schedules()


def copies_continue(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """Nothing ends the older copy of a task."""
    patch.setattr(World, "fence", lambda self, older: None)
    return copies_claim(patch)


def copies_claim(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """An agent does not look for a newer copy of its task, nor for its generation, before it claims something."""
    is_over = SimRunView.is_over
    patch.setattr(SimCopy, "require_newest", lambda self: None)
    patch.setattr(SimRunView, "is_over", lambda self, number: not self._owner.superseded and is_over(self, number))
    return schedules(drawn=HELD_UP)


def slow_reports(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A worker's task is killed; the disk is slow between its report and the generation that it begins."""
    restart = Restarter.restart_gang

    def restart_late(self: Restarter, generation: int, own: ends.End) -> None:
        Now.world.sleep(2.0)
        restart(self, generation, own)

    patch.setattr(Restarter, "restart_gang", restart_late)
    killed = Drawn({"workers": 2}, scripted=True, steps=15, save_every=5, faults=[(8.0, "kill task", "worker-0", 20.0)])
    return schedules(drawn=killed)


def mute(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A worker's program is killed while its agent stands still and cannot say so; the others wait too briefly."""
    patch.setattr(decide, "PEER_LOST_PATIENCE_S", 1.0)
    faults = [(8.0, "freeze task", "worker-1", 20.0), (8.2, "kill program", "worker-1", 0.0)]
    return schedules(drawn=Drawn({"workers": 2}, scripted=True, steps=15, save_every=5, linked=True, faults=faults))


def ready_or_not(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A generation begins with standby processes whether or not they are ready."""
    patch.setattr(standby_cluster, "is_complete", lambda *_: True)
    return schedules(hasty, drawn=replace(FORMED, standby_s=None))


def each_for_itself(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """Each agent decides by itself whether its generation begins with standby processes: if it has had one."""
    patch.setattr(standby_cluster, "starts_with_standby", lambda run, task, generation: generation > 0)
    return schedules(hasty, drawn=replace(FORMED, faults=[*FORMED.faults, (12.0, "kill standby", "worker-0", 0.0)]))


def hasty(schedule: Schedule) -> None:
    """Bound a schedule in which one generation follows the other."""
    schedule.world.LIMIT_S = 30.0


def dead_ones_are_waited_for(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """An agent whose standby process has died leaves it to others to begin another generation."""
    restart = Restarter.restart_gang

    def restart_others(self: Restarter, generation: int, own: ends.End) -> None:
        if own.cause == "its standby process had ended":
            Now.world.sleep(0.5)
        else:
            restart(self, generation, own)

    patch.setattr(Restarter, "restart_gang", restart_others)
    patch.setattr(standby_cluster, "withdraw_report", lambda *_: None)  # as if it had died a moment ago
    return schedules(drawn=replace(FORMED, faults=[(12.0, "kill standby", "worker-0", 0.0), *FORMED.faults]))


def late_tasks_are_waited_for(patch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """A generation may begin with the standby process of a silent task, and nobody notices that it never joins."""
    frozen = Watchdog._frozen

    def only_silent(self: Watchdog, *arguments: Any) -> Any:
        self._behind.clear()
        return frozen(self, *arguments)

    patch.setattr(Watchdog, "_frozen", only_silent)
    return schedules(drawn=NEVER_JOINS)


FORMED = Drawn(
    {"workers": 1}, scripted=False, steps=25, save_every=5, faults=[(15.0, "kill program", "chief", 0.0)], standby_s=0.0
)
"""Standby processes have formed a cluster when a program is killed."""


NEVER_JOINS = replace(
    FORMED,
    topology={"workers": 2},
    faults=[(15.0, "freeze agent", "worker-0", FOREVER_S), (15.2, "kill program", "chief", 0.0)],
)
"""An agent is frozen permanently a moment before a generation begins with standby processes."""


NEVER_BEGINS = Drawn(
    {"workers": 1}, scripted=False, steps=9, save_every=3, faults=[(2.0, "freeze program", "worker-0", FOREVER_S)]
)
"""A program is frozen while it imports."""


NEVER_DECIDES = Drawn(
    {"workers": 2}, scripted=True, steps=9, save_every=3,
    faults=[(3.0, "kill program", "worker-0", 0.0), (3.5, "freeze task", "worker-0", FOREVER_S)],
)  # fmt: skip
"""A script is killed before the others have met it, and its task is frozen once that is reported."""


NEVER_RECORDS = Drawn(
    {"workers": 1}, scripted=False, steps=9, save_every=3, faults=[(8.0, "freeze agent", "chief", FOREVER_S)]
)
"""The chief's agent is frozen, while its program trains to the end."""


NOBODY_ENDS = replace(NEVER_RECORDS, topology={"workers": 1, "ps": 1, "evaluator": True})
"""The same, where the programs of the other tasks do not end by themselves."""


LEFT_ALONE = replace(NEVER_RECORDS, topology={"workers": 0, "evaluator": True})
"""The same, where the only other task is an evaluator."""


STOPPED_AS_IT_DIES = replace(
    LEFT_ALONE,
    steps=30,
    faults=[(8.0, "stop", "", 0.0), (9.0, "kill program", "evaluator", 0.0), (9.6, "freeze agent", "chief", FOREVER_S)],
)
"""The evaluator dies during a stop, at whose end the chief's agent is frozen."""


STOPPED_AS_IT_PAUSES = replace(
    LEFT_ALONE,
    steps=30,
    faults=[(7.5, "fail program", "evaluator", 0.0), (8.0, "stop", "", 0.0), (9.6, "freeze agent", "chief", FOREVER_S)],
)
"""The same, where the evaluator waits to start again."""


STALE = Drawn(
    {"workers": 2}, scripted=False, steps=25, save_every=5, faults=[(15.0, "kill program", "worker-0", 0.0)],
    linked=True, stale_s=60.0,
)  # fmt: skip
"""Hosts may not see for a minute what another one did when a program is killed."""


HELD_UP = Drawn({"workers": 1}, scripted=True, steps=80, save_every=5, faults=[(1.0, "second copy", "worker-0", 70.0)])
"""A host stands still in the rendezvous until that has timed out; another copy of its task has long come."""


def schedules(
    change: Callable[[Schedule], object] = lambda schedule: None, drawn: Drawn | None = None
) -> Iterator[Schedule]:
    """Yield schedules, each changed before it runs."""
    for seed in range(SEEDS_OF_A_MUTATION):
        schedule = Schedule(seed, drawn)
        schedule.world.LIMIT_S = 2_000.0
        change(schedule)
        yield schedule


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    # Whoever records the outcome replaces it.
    "claim twice": ("outcome", changed(lambda schedule: schedule.folder.__dict__.update(exclusive=False))),
    "token without generation": ("generations", token_without_generation),
    "news of earlier generations": ("generations", news_of_earlier_generations),
    # Agents learn what others did from the folder only, which their hosts show late.
    "stale caches": ("seen", changed(lambda schedule: setattr(schedule.world, "linked", False), STALE)),
    "listed generations only": ("policy", listed_generations_only),
    # An attempt's program is not ended with it.
    "keep programs": ("programs", replaced(machine.SimProgram, "end", lambda self, grace_s: self.code or 0)),
    # A checkpoint counts before it is complete.
    "unfinished checkpoints": (
        "checkpoint",
        changed(lambda schedule: setattr(schedule.training, "saves_whole", False)),
    ),
    # An agent that comes back does not report that its task was killed.
    "no word of a death": ("policy", replaced(Agent, "_report_own_death", lambda self: None)),
    # Silent and frozen tasks are not noticed.
    "nobody misses the silent": ("seen", replaced(Watchdog, "_frozen", lambda *_: None)),
    "damaged records stay": ("end", damaged_records_stay),
    # No program is ended for a stop request, as if no task were asked to stop.
    "stops unheard": ("stop", forgotten(serves=True)),
    # Agents look at the outcome only.
    "ignore generations": (
        "seen",
        replaced(SimRunView, "is_over", lambda self, generation: self.outcome is not None),
    ),
    "kills count": ("policy", kills_count),
    "failures do not count": ("policy", failures_do_not_count),
    "no single steps": ("policy", no_single_steps),
    # A task that restarts alone waits for those that have met its previous attempt.
    "met again": ("policy", replaced(elastic.Members, "_passed_rendezvous", lambda self, generation: frozenset())),
    # A script that lost contact does not wait for the task that was killed to report it.
    "no patience": ("policy", replaced(decide, "patience_s", lambda facts: 0.0)),
    "copies claim": ("policy", copies_claim),
    "copies continue": ("copies", copies_continue),
    # Standby processes form their cluster on the ports of the programs that train.
    "same ports": ("ports", replaced(standby_cluster, "_other", lambda port: port, FORMED)),
    "ready or not": ("policy", ready_or_not),
    "each for itself": ("policy", each_for_itself),
    "dead ones are waited for": ("seen", dead_ones_are_waited_for),
    "late tasks are waited for": ("stuck", late_tasks_are_waited_for),
    # An agent does not look whether a signal has stopped its program before that writes heartbeats.
    "stopped programs are waited for": ("stuck", replaced(machine.SimProgram, "stopped_s", 0.0, NEVER_BEGINS)),
    # A task that has reported its failure is waited for, however long its agent stands still.
    "failed scripts are waited for": ("stuck", replaced(watchdog, "UNDECIDED_S", FOREVER_S, NEVER_DECIDES)),
    # A task that has done its work waits for the chief's agent, however long that stands still.
    "only the chief records the end": ("stuck", forgotten(NEVER_RECORDS, chief_done_s=0.0)),
}
"""The invariant that breaks, and the mutation."""
