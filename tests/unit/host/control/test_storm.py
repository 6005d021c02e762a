"""One fault after the other: which ones are drawn, when the storm is over, and when it counts as outlived."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Summary
from cluster.host.control import chaos
from cluster.host.control.chaos import Fault, FaultCost
from cluster.system.errors import UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat

LONG = 10**9
COST = FaultCost("kill", "chief", 110, 0.1, 2.0, 4, None)


def reach(run: RunFolder, step: int, steps_total: int = LONG) -> None:
    beat(run, "chief", step=step, steps_total=steps_total)


@pytest.fixture
def run(make_run) -> RunFolder:
    made = make_run(workers=2, evaluator=True)
    reach(made, 100)
    return made


@pytest.fixture
def injected(monkeypatch) -> list[tuple[int, Fault]]:
    """The faults that a storm injects and the newest step when it decided on each; the run then does 3 steps more."""
    faults: list[tuple[int, Fault]] = []

    def inject(run: RunFolder, fault: Fault, timeout_s: float) -> FaultCost:
        faults.append((run.newest_step, fault))
        reach(run, fault.at_step + 3, run.heartbeats()["chief"].steps_total)
        return FaultCost(fault.kind, fault.task, fault.at_step, 0.1, 2.5, 4, None)

    monkeypatch.setattr(chaos, "inject", inject)
    return faults


def deal(run: RunFolder, count: int = 10, seed: int = 7, kinds: Sequence[str] = ()) -> list[FaultCost]:
    return chaos.inject_all(run, count, seed, kinds)


def test_the_same_seed_draws_the_same_faults(run, injected):
    drawn = []
    for seed in (7, 7, 8):
        deal(run, seed=seed)
        drawn.append([(fault.kind, fault.whole, fault.task) for _, fault in injected])
        injected.clear()
    first, again, other = drawn
    assert 10 == len(first)
    assert first == again != other


def test_the_run_does_new_steps_between_two_faults(run, injected):
    assert 60 == len(deal(run, count=60))
    waits = {fault.at_step - newest for newest, fault in injected}
    assert (5, 40) == (min(waits), max(waits))
    assert 100 == injected[0][0]


@pytest.mark.parametrize(
    ("topology", "runtime", "missing"),
    [
        ({"workers": 1}, "local", {"partition", "oom"}),
        ({"workers": 1}, "docker", set()),
        ({"workers": 1, "ps": 1}, "local", {"partition", "oom", "corrupt"}),
        ({"workers": 1, "ps": 1}, "docker", {"corrupt"}),
    ],
)
def test_only_what_the_run_can_outlive_is_drawn(make_run, injected, topology, runtime, missing):
    run = make_run("another", **topology, evaluator=True)
    write_json(run.compose, {"x-runtime": runtime})
    reach(run, 0)
    deal(run, count=50)
    drawn = [fault for _, fault in injected]
    assert {"kill", "pause", "slow", "partition", "oom", "corrupt"} - missing == {fault.kind for fault in drawn}
    assert {task.name for task in run.load_cluster().tasks} - {"evaluator"} == {fault.task for fault in drawn}
    assert {"kill"} == {fault.kind for fault in drawn if fault.whole}
    assert {True, False} == {fault.whole for fault in drawn if fault.kind == "kill"}


@pytest.mark.parametrize(("runtime", "drawn"), [("local", True), ("docker", True), ("swarm", False)])
def test_a_worker_is_lost_only_where_the_run_continues_without_and_then_spared(make_run, injected, runtime, drawn):
    run = make_run("another", workers=2)
    write_json(run.compose, {"x-runtime": runtime})
    write_json(run.control / "started.json", read_json(run.control / "started.json") | {"min_workers": 1})
    run.begin_generation(1, left_out=["worker-0"])
    reach(run, 0)
    deal(run, count=40)
    assert ({"worker-1"} if drawn else set()) == {fault.task for _, fault in injected if fault.kind == "lose"}
    assert {"chief", "worker-1"} == {fault.task for _, fault in injected}
    injected.clear()
    deal(run, count=20, kinds=["pause", "slow"])
    assert {("pause", False), ("slow", False)} == {(fault.kind, fault.whole) for _, fault in injected}


@pytest.mark.parametrize(
    ("steps_total", "ended", "expected"), [(0, False, 3), (140, False, 0), (141, False, 1), (LONG, True, 0)]
)
def test_only_a_run_with_room_gets_faults(run, injected, steps_total, ended, expected):
    """0: no task has reported the run's end yet."""
    reach(run, 100, steps_total)
    if ended:
        write_json(run.summary, {"state": "succeeded"})
    assert expected == len(deal(run, count=3)) == len(injected)


@pytest.mark.parametrize("ended", ["failed", None])
def test_a_run_that_ends_ends_the_storm(run, monkeypatch, ended):
    expected = [COST, replace(COST, ended=ended)]
    monkeypatch.setattr(chaos, "inject", Mock(side_effect=[*expected, COST if ended else UsageError("over")]))
    assert expected == deal(run)


@pytest.mark.parametrize(
    ("kinds", "made", "named"),
    [
        (["kill", "stop"], "", "--kinds stop"),
        (["diskfull"], "", "--kinds diskfull"),
        (["kill", "puase"], "", "'pause'"),
        (["partition"], "", "partition"),
        ([], "script", "script"),
        ([], "ended", "not in progress"),
    ],
)
def test_what_makes_no_storm_is_refused_and_nothing_injected(run, injected, kinds, made, named):
    if made == "script":
        write_json(run.config, {"script": "train.py", "arguments": []})
    if made == "ended":
        write_json(run.summary, {"state": "succeeded"})
    with pytest.raises(UsageError, match=named):
        chaos.run_storm(run, 2, 0, kinds, 12.0)
    assert [] == injected


@pytest.mark.parametrize(
    ("ended", "weights", "dealt", "calm", "code"),
    [
        ("succeeded", "abc", 2, "abc", 0),
        ("succeeded", "abc", 2, None, 0),  # nothing to compare with
        ("succeeded", "abc", 1, "abc", 1),
        ("succeeded", "abc", 2, "def", 1),
        ("failed", None, 2, "abc", 1),
        ("stopped", "abc", 2, "abc", 1),
    ],
)
def test_a_storm_is_outlived_with_all_faults_a_success_and_the_same_bits(
    make_run, monkeypatch, ended, weights, dealt, calm, code
):
    run = make_run("stormy", workers=1)
    reach(run, 100)
    run.event("chief", "fault", step=100, kind="kill")
    if calm:
        write_json(make_run("calm", workers=1).summary, {"state": "succeeded", "weights_sha256": calm})
    given: list[Any] = []
    end = {"state": ended, "weights_sha256": weights}

    def until_end(run: RunFolder) -> Summary:
        write_json(run.summary, end)
        return Summary.from_json(end)

    monkeypatch.setattr(chaos, "inject_all", lambda *arguments: given.append(arguments[:5]) or [COST] * dealt)
    monkeypatch.setattr(chaos.foreground, "show_until_end", until_end)
    assert code == chaos.run_storm(run, 2, 7, ["kill"], 12.0)
    assert [(run, 2, 7, ["kill"], 12.0)] == given
