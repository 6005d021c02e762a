"""Simulated schedules: real agents in a simulated world that crashes, freezes and delays them; see tests/simulation.

`SCHEDULES=100000 SEED=0 pytest -m long tests/unit/agent/test_simulation.py` runs as many as one likes. A broken
invariant names its seed; `SEED=<it> SCHEDULES=1` runs that schedule again, exactly.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

import pytest

from cluster.agent import agent
from cluster.system.errors import EXIT_TIMEOUT
from tests.simulation import machine, mutations
from tests.simulation.drawn import FOREVER_S, Drawn
from tests.simulation.mutations import HELD_UP, mute, schedules, slow_reports
from tests.simulation.schedule import Schedule, explain
from tests.simulation.world import Broken

IN_EACH_TEST_RUN, ORDINARY = 200, 600
"""How many schedules `make test` runs, and those of `.ci/run` with it."""
FEW = 12
"""Schedules of one kind in `make test-fast`."""


@pytest.fixture
def simulated(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """A simulated machine, on one core: only one thread runs at a time, and waking it on another core takes longer."""
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    machine.install(monkeypatch)
    yield monkeypatch
    os.sched_setaffinity(0, cores)


@pytest.fixture(params=[1, pytest.param(10, marks=pytest.mark.long)])
def times(request) -> int:
    """How many times as many schedules of one kind are run as in `make test`."""
    return request.param


def run_all(seeds: Iterable[int]) -> Counter[str]:
    """Run schedules; return how many there were of each outcome and fault."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            outcome = schedule.run()
        except Exception as error:
            error.add_note(explain(schedule))
            raise
        counts.update(["schedules", f"state {outcome['state']}", *schedule.drawn.kinds])
        counts["stale caches"] += bool(schedule.drawn.stale_s)
        counts["with standby processes"] += sum("standby_ports" in each for each in schedule.begun)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(IN_EACH_TEST_RUN), pytest.param(range(IN_EACH_TEST_RUN, ORDINARY), marks=pytest.mark.extended)],
    ids=["first", "more"],
)
def test_no_schedule_breaks_an_invariant(simulated, seeds):
    counts = run_all(seeds)
    assert len(seeds) == counts["schedules"]
    assert {"state succeeded", "state stopped", "state failed"} <= counts.keys()
    faults = {"cut", "second copy", "kill standby", "kill program", "kill task", "freeze program", "freeze task"}
    faults |= {"with standby processes", "stale caches", "lose task", "stop", "crash", "own failure"}
    assert faults <= counts.keys()


@pytest.mark.long
def test_many_schedules_break_no_invariant(simulated, capsys):
    first, number = int(os.environ.get("SEED", str(ORDINARY))), int(os.environ.get("SCHEDULES", "10000"))
    counts = run_all(range(first, first + number))
    with capsys.disabled():
        print(f"\n{counts.pop('schedules')} schedules from seed {first}: {dict(sorted(counts.items()))}")


@pytest.mark.parametrize("peer", [slow_reports, mute], ids=["reports slowly", "is killed while its agent stands still"])
def test_a_script_outlives_a_peer_that(simulated, times, peer):
    assert ["succeeded"] * FEW * times == [schedule.run()["state"] for schedule in islice(peer(simulated), FEW * times)]


SCRIPT = partial(Drawn, scripted=True, linked=True)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("drawn", "number"),
    [
        # A peer crashes and its host is replaced at once.
        (
            SCRIPT(
                {"workers": 1}, steps=8, save_every=3,
                fails_at={2: ("chief", -11, 1)}, faults=[(4.0, "second copy", "chief", 40.0)],
            ),
            50,
        ),
        # A killed task still sees the previous generation.
        (
            SCRIPT(
                {"workers": 1}, steps=9, save_every=4, skewed=True, stale_s=38.0,
                faults=[(6.5, "kill task", "chief", 23.0), (14.3, "kill task", "worker-0", 17.0)],
            ),
            50,
        ),
        # A host is replaced while the chief does not see the next generation.
        (
            SCRIPT(
                {"workers": 2}, steps=12, save_every=5, stale_s=14.4,
                faults=[
                    (6.9, "freeze task", "worker-0", 5.3),
                    (8.1, "second copy", "worker-1", 33.7),
                    (20.3, "cut", "worker-1", 8.1),
                ],
            ),
            100,
        ),
        # An older copy's rendezvous times out.
        (HELD_UP, 50),
    ],
)  # fmt: skip
def test_a_script_outlives(simulated, drawn, number, times):
    assert {"succeeded"} == {schedule.run()["state"] for schedule in islice(schedules(drawn=drawn), number * times)}


def test_a_stop_while_a_script_waits_for_a_killed_peer_is_not_a_failure(simulated, times):
    drawn = Drawn({"workers": 1}, scripted=True, steps=15, save_every=5)
    drawn.faults = [(8.0, "kill task", "worker-0", 20.0), (10.5, "stop", "", 0.0)]
    assert {"stopped"} == {schedule.run()["state"] for schedule in islice(schedules(drawn=drawn), FEW * times)}


def test_a_chief_that_continues_alone_restarts_with_its_standby_process(simulated, times):
    lost = [(1.0, "lose task", "worker-0", 200.0), (90.0, "kill program", "chief", 0.0)]
    drawn = Drawn({"workers": 1}, scripted=False, steps=40, save_every=5, min_workers=0, standby_s=0.0, faults=lost)
    alone = list(islice(schedules(drawn=drawn), FEW * times))
    assert {"succeeded"} == {schedule.run()["state"] for schedule in alone}
    assert any("standby_ports" in each for schedule in alone for each in schedule.begun)


def test_standby_processes_form_their_cluster_again_once_one_has_ended(simulated, times):
    faults = [(12.0, "kill standby", "worker-0", 0.0), (80.0, "kill program", "chief", 0.0)]
    drawn = Drawn({"workers": 2}, scripted=False, steps=150, save_every=5, standby_s=0.0, faults=faults)
    for schedule in islice(schedules(drawn=drawn), FEW * times):
        assert "succeeded" == schedule.run()["state"]
        assert "standby_ports" in schedule.begun[-1]


def test_a_run_that_too_few_tasks_come_back_to_in_time_fails(simulated, times):
    away = [(8.0, "lose task", "worker-0", 100.0), (8.0, "freeze task", "worker-1", 90.0)]
    drawn = Drawn({"workers": 2}, scripted=False, steps=40, save_every=5, min_workers=1, faults=away)
    outcomes = [schedule.run() for schedule in islice(schedules(drawn=drawn), FEW * times)]
    assert {("failed", EXIT_TIMEOUT)} == {(each["state"], each["exit_code"]) for each in outcomes}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("away", "number"),
    [
        # The worker comes back when the others have waited for it almost as long as they may.
        *(
            ([(8.0, "lose task", "worker-0", seconds), (9.0, "kill program", "worker-1", 0.0)], 25)
            for seconds in (57.0, 59.0, 61.0, 63.0)
        ),
        # The others have met the worker, and wait for the chief alone, which waits for that worker.
        ([(1.9, "lose task", "worker-0", 200.0)], 75),
    ],
)
def test_a_gang_continues_whenever_a_worker_is_away(simulated, times, away, number):
    drawn = Drawn({"workers": 2}, scripted=False, steps=12, save_every=4, linked=True, min_workers=1, faults=away)
    assert {"succeeded"} == {schedule.run()["state"] for schedule in islice(schedules(drawn=drawn), number * times)}


def test_an_evaluator_that_is_left_alone_ends_the_run_and_names_a_task(simulated, times):
    frozen = [(8.0, "freeze task", name, FOREVER_S) for name in ("chief", "worker-0")]
    drawn = Drawn({"workers": 1, "evaluator": True}, scripted=False, steps=15, save_every=5, faults=frozen)
    outcomes = [schedule.run() for schedule in islice(schedules(drawn=drawn), FEW * times)]
    assert {("failed", "chief", EXIT_TIMEOUT)} == {(e["state"], e["task"], e["exit_code"]) for e in outcomes}


@pytest.mark.parametrize(
    "drawn",
    [
        *(mutations.NEVER_JOINS, mutations.NEVER_BEGINS, mutations.NEVER_RECORDS, mutations.NOBODY_ENDS),
        *(mutations.NEVER_DECIDES, mutations.LEFT_ALONE, mutations.STOPPED_AS_IT_DIES, mutations.STOPPED_AS_IT_PAUSES),
    ],
)
def test_a_run_survives_or_names_a_process_that_is_frozen_permanently(simulated, drawn, times):
    for schedule in islice(schedules(drawn=drawn), FEW * times):
        schedule.run()


def test_a_schedule_can_be_repeated_exactly(simulated):
    def trace(seed: int) -> list[tuple[float, str, str]]:
        schedule = Schedule(seed)
        schedule.run()
        return schedule.world.trace

    for seed in range(FEW // 2):
        assert trace(seed) == trace(seed)


@pytest.mark.extended
@pytest.mark.parametrize(("invariant", "mutation"), mutations.MUTATIONS.values(), ids=mutations.MUTATIONS)
def test_without_its_protection_an_invariant_breaks(simulated, invariant, mutation):
    assert agent.POLL_S == machine.POLL_S
    broken = []
    for schedule in mutation(simulated):
        try:
            schedule.run()
        except Broken as error:
            broken.append(str(error).partition(":")[0])
            if broken[-1] == invariant:
                return
    pytest.fail(f"{len(broken)} schedules broke: {Counter(broken)}")
