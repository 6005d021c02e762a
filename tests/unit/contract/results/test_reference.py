"""The undisturbed reference run of a run: which run it is, and what is said of the two."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract.results import reference
from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json

CONFIG = {"model": "cnn", "seed": 1, "global_batch": 192, "log_every": 10, "checkpoint_every": 100}

EndedRun = Callable[..., RunFolder]


@pytest.fixture
def ended(make_run) -> EndedRun:
    """Makes a run that has ended, each later than the one before; takes what differs and `spec.build`'s options."""
    made: list[RunFolder] = []

    def make(
        name: str,
        state: str = "succeeded",
        weights: str | None = "abc",
        restarts: int = 0,
        version: str | None = "1",
        config: dict[str, Any] | None = None,
        **topology: Any,
    ) -> RunFolder:
        run = make_run(name, **{"workers": 1} | topology)
        write_json(run.config, CONFIG | (config or {}))
        if version:
            write_json(run.control / "data.json", {"version": version})
        costs = [{"resumed_s": 2.0 + number} for number in range(restarts)]
        write_json(run.summary, {"state": state, "weights_sha256": weights, "restarts": costs})
        for number in range(1, restarts + 1):
            run.begin_generation(number, task="chief", cause="killed")
        made.append(run)
        os.utime(run.summary, (len(made), len(made)))
        return run

    return make


def test_another_number_of_workers_gives_the_same_bits_with_virtual_shards_alone(ended):
    for config, same in ((None, None), ({"bitwise_elastic": 4}, True)):
        ended(f"calm-{same}", config=config)
        run = ended(f"smaller-{same}", config=config, restarts=1)
        run.begin_generation(2, task="worker-0", left_out=["worker-0"])
        assert same is reference.same_bits(run)


# Which one it is


def test_the_reference_is_the_newest_run_of_the_same_training(ended):
    ended("z-older", weights="old")
    ended("a-newer", weights="new")
    run = ended("stormy", restarts=1)
    assert {"run": "a-newer", "weights_sha256": "new"} == reference.find(run)


def test_no_run_is_its_own_reference(ended):
    run = ended("alone")
    assert reference.find(run) is None
    assert reference.same_bits(run) is None


@pytest.mark.parametrize(
    "config",
    [
        {"log_every": 1},
        {"checkpoint_every": 5},
        {"keep_checkpoints": 1},
        {"steps_per_loop": 7},
    ],
)
def test_what_changes_no_bit_makes_no_difference(ended, config):
    ended("calm", config=config)
    run = ended("stormy")
    assert {"run": "calm", "weights_sha256": "abc"} == reference.find(run)


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"seed": 2}},
        {"config": {"global_batch": 96}},
        {"config": {"augment": True}},
        {"workers": 2},
        {"workers": 0},
        {"devices": 2},
        {"version": "2"},
        {"version": None},
        {"state": "failed"},
        {"state": "stopped"},
        {"restarts": 1},
    ],
    ids=str,
)
def test_a_run_that_differs_failed_or_had_restarts_is_no_reference(ended, other):
    ended("calm", **other)
    assert reference.find(ended("stormy")) is None


def test_the_strategy_of_one_process_makes_a_difference(ended):
    ended("calm", workers=0, strategy="one")
    assert reference.find(ended("mirrored", workers=0, strategy="mirrored")) is None
    assert reference.find(ended("one", workers=0, strategy="one")) is not None


@pytest.mark.parametrize(
    "other", [{"workers": 2}, {"workers": 0, "devices": 2}, {"workers": 0, "strategy": "one"}], ids=str
)
def test_with_virtual_shards_the_number_of_replicas_changes_no_bit(ended, other):
    ended("calm", config={"bitwise_elastic": 6}, **other)
    assert "calm" == reference.find(ended("stormy", config={"bitwise_elastic": 6}))["run"]
    assert reference.find(ended("other", config={"bitwise_elastic": 4})) is None


def test_an_evaluator_changes_no_bit(ended):
    ended("calm", evaluator=True)
    assert reference.find(ended("stormy")) is not None


def test_a_run_that_has_not_ended_is_no_reference(ended, make_run):
    write_json(make_run("running", workers=1).config, CONFIG)
    assert reference.find(ended("stormy")) is None


# Whether the bits are the same


@pytest.mark.parametrize(("weights", "same"), [("abc", True), ("def", False)])
def test_bits_are_compared_with_the_reference_run_s(ended, weights, same):
    ended("calm", weights="abc")
    assert same == reference.same_bits(ended("stormy", weights=weights, restarts=2))


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_run_that_did_not_succeed_is_not_compared(ended, state):
    ended("calm")
    assert reference.same_bits(ended("stormy", state=state)) is None


def test_parameter_servers_repeat_no_bits(ended):
    ended("calm", ps=1)
    run = ended("stormy", ps=1)
    assert reference.find(run) is not None
    assert reference.same_bits(run) is None


@pytest.mark.parametrize(("shards", "weights", "same"), [(0, "def", None), (6, "def", False), (6, "abc", True)])
def test_a_run_that_was_scaled_repeats_the_bits_of_virtual_shards_alone(ended, shards, weights, same):
    ended("calm", config={"bitwise_elastic": shards})
    run = ended("stormy", config={"bitwise_elastic": shards}, weights=weights)
    run.event("chief", "scaled", workers_before=2, workers_after=1)
    assert same is reference.same_bits(run)


def test_a_script_s_weights_are_not_known_and_not_compared(ended):
    script = {"config": {"script": "train.py", "arguments": []}, "weights": None}
    ended("calm", **script)
    run = ended("stormy", **script)
    assert reference.same_bits(run) is None
    run.event("chief", "fault", kind="kill")
    assert ["faults       1 injected"] == reference.fault_lines(run)


# What is reported


@pytest.mark.parametrize(("weights", "verdict"), [("abc", "the same bits as"), ("def", "NOT those of")])
def test_a_run_with_faults_reports_their_cost_and_whether_its_bits_are_the_same(ended, weights, verdict):
    ended("calm")
    run = ended("stormy", weights=weights, restarts=4)  # after 2, 3, 4 and 5 s
    for _ in range(5):
        run.event("chief", "fault", kind="kill")
    assert [
        "faults       5 injected; next new step after 3.50 s (median), 5.00 s (most)",
        f"weights      {verdict} the undisturbed run calm",
    ] == reference.fault_lines(run)
