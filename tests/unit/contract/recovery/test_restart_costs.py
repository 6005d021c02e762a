"""What a restart cost, and what share of the time went into steps that count, from what the tasks recorded."""

import time
from typing import Any

import pytest

from cluster.contract.recovery import restart_costs
from cluster.contract.results import summary
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Role
from cluster.system.json_files import append_json, read_json, write_json
from tests.support.beats import LEDGER, end

Moment = tuple[float, str, str, dict[str, Any]]
"""Seconds from the start of a story, as `failed_at` of the detail is; a task, an event in generation 0, its detail."""


def tell(run: RunFolder, *story: Moment, gang_at: float | None = None) -> float:
    """Record what happened, and the gang's restart a second after worker-0's death; return when the story began."""
    began = time.time() + 10
    for at, task, event, detail in story:
        failed = {"failed_at": began + detail["failed_at"]} if "failed_at" in detail else {}
        line = {"time": began + at, "task": task, "event": event, "generation": 0, "step": None}
        append_json(run.events_log, line | {"detail": detail | failed})
    if gang_at is not None:
        why = {"task": "worker-0", "cause": "killed", "failed_at": began + gang_at - 1, "step": 5}
        write_json(run.control / "generations" / "1.json", {"generation": 1, "time": began + gang_at} | why)
    return began


def test_restarts_are_counted_from_their_own_fault(run):
    now = time.time() + 10
    for after_s, event, generation, step in [
        (0, "fault", 0, 50),
        (4, "restored", 1, 40),
        (5, "first step", 1, 41),
        (8, "restored", 2, 60),
        (9, "first step", 2, 61),
        (12, "restored", 3, 55),
        (13, "first step", 3, 56),
    ]:
        line = {"time": now + after_s, "task": "chief", "event": event, "generation": generation, "step": step}
        append_json(run.events_log, line | {"detail": {"source": "memory"} if generation == 1 else {}})
    # The first death was an injected fault; the second was not, and its agent says when it was.
    for number, begun_s, failed_s, step in [(1, 2, 1, 50), (2, 7, 6, 70), (3, 11, 10, 0)]:
        why = {"task": "worker-0", "cause": "killed", "failed_at": now + failed_s, "step": step}
        write_json(run.control / "generations" / f"{number}.json", {"generation": number, "time": now + begun_s} | why)
    assert [
        {"generation": 1, "detected_s": 2.0, "resumed_s": 5.0, "steps_lost": 10, "restored_from": "memory"},
        {"generation": 2, "detected_s": 1.0, "resumed_s": 3.0, "steps_lost": 10, "restored_from": ""},
        {"generation": 3, "detected_s": 1.0, "resumed_s": 3.0, "steps_lost": 5, "restored_from": ""},
    ] == [
        {key: restart.get(key, "") for key in ("generation", "detected_s", "resumed_s", "steps_lost", "restored_from")}
        for restart in end(run, "succeeded")["restarts"]
    ]


def test_the_summary_counts_a_restart_from_the_injected_fault(run):
    started = read_json(run.control / "started.json")["time"]
    for number, began in [(0, 1.0), (1, 9.0)]:
        times = {"began": started + began, "first_step_at": started + began + 1, "updated_at": started + began + 1}
        write_json(run.ledger(number), LEDGER | times | {"generation": number, "seconds": {}})
    fault = {"time": started + 4, "task": "chief", "event": "fault", "generation": 0, "step": 1}
    append_json(run.events_log, fault | {"detail": {"kind": "kill"}})
    why = {"task": "chief", "cause": "killed", "failed_at": started + 5, "step": 1}
    write_json(run.control / "generations" / "1.json", {"generation": 1, "time": started + 6} | why)
    write_json(run.control / "outcome.json", {"state": "succeeded", "time": started + 20})
    split = summary.write_summary(run, settle_s=0).goodput_split
    assert (1.0, 1.0, 6.0) == (split["start"], split["compile"], split["restart"])


@pytest.mark.parametrize(
    ("story", "gang_s", "alone_s"),
    [
        ([], 1.0, 1.0),
        ([(4.0, "worker-0", "fault", {"kind": "pause"})], 6.0, 6.0),
        ([(4.0, "chief", "fault", {"kind": "corrupt"})], 6.0, 1.0),  # the gang's restart, whichever task failed
        ([(4.0, "worker-0", "fault", {"kind": "slow"})], 1.0, 1.0),  # that lets nothing start again
        ([(4.0, "worker-0", "fault", {"kind": "kill"}), (6.0, "worker-0", "fault", {"kind": "slow"})], 6.0, 6.0),
        ([(4.0, "worker-0", "fault", {"kind": "pause"}), (7.0, "worker-0", "fault", {"kind": "kill"})], 3.0, 3.0),
        ([(4.0, "worker-0", "fault", {"kind": "kill"}), (5.0, "worker-0", "restarted", {"cause": "killed"})], 1.0, 1.0),
        ([(4.0, "worker-0", "fault", {"kind": "kill"}), (5.0, "chief", "restarted", {"cause": "killed"})], 1.0, 6.0),
        ([(11.0, "worker-0", "fault", {"kind": "kill"})], 1.0, 1.0),  # the restart was before
    ],
)
def test_a_restart_counts_from_the_newest_fault_that_nothing_has_dealt_with(make_run, story, gang_s, alone_s):
    gang, alone = (make_run(name, workers=1) for name in ("gang", "alone"))
    tell(gang, *story, gang_at=10.0)
    assert [gang_s] == [r["detected_s"] for r in end(gang, "succeeded")["restarts"] if r["generation"] == 1]
    died = (10.0, "worker-0", "restarted", {"cause": "killed", "failed_at": 9.0})
    later = [(11.0, "chief", "resumed", {}), (12.0, "worker-0", "resumed", {})]
    tell(alone, (3.0, "worker-0", "resumed", {}), *story, died, *later)
    restart = end(alone, "succeeded")["restarts"][-1]  # a fault counts for one restart alone
    assert ("worker-0", alone_s, alone_s + 2) == (restart["task"], restart["detected_s"], restart["resumed_s"])
    assert ("killed", 0) == (restart["cause"], restart["steps_lost"])


def test_an_evaluator_s_restart_is_reported_on_request(make_run):
    run = make_run("demo", workers=1, evaluator=True)
    fault, killed = {"kind": "kill"}, {"cause": "killed"}
    began = tell(run, (0.0, "evaluator", "fault", fault), (3.0, "evaluator", "restarted", killed))
    assert [] == restart_costs.costs(run, began - 1)
    (cost,) = restart_costs.costs(run, began - 1, (Role.EVALUATOR,))
    assert ("evaluator", 3.0, None, 0) == tuple(
        getattr(cost, key) for key in ("task", "detected_s", "resumed_s", "steps_lost")
    )
    assert [] == restart_costs.costs(run, began + 3.5, (Role.EVALUATOR,))


def test_without_a_checkpoint_every_step_is_done_again(run):
    run.begin_generation(1, task="chief", cause="killed", failed_at=time.time(), step=7)
    run.event("chief", "initialized", step=0)
    (restart,) = end(run, "succeeded")["restarts"]
    assert 7 == restart["steps_lost"]
