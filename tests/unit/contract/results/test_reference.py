"""The undisturbed reference run of a run: which run it is, and what is said of the two."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from cluster.contract.results import reference
from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json

CONFIG = {"model": "cnn", "seed": 1, "global_batch": 192, "log_every": 10, "checkpoint_every": 100}


@pytest.fixture
def ended(make_run) -> Callable[..., RunFolder]:
    """Makes a run that has ended, each later than the one before; takes what differs and `spec.build`'s options."""
    made: list[RunFolder] = []

    def make(
        name: str,
        state: str = "succeeded",
        weights: str | None = "abc",
        restarts: int = 0,
        version: str | None = "1",
        code: str = "a",
        config: dict[str, Any] | None = None,
        **topology: Any,
    ) -> RunFolder:
        run = make_run(name, **{"workers": 1} | topology)
        write_json(run.config, CONFIG | (config or {}))
        write_json(run.manifest, {"own_code": {"0/mine": code}})
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


def test_the_reference_is_the_newest_run_of_the_same_training(ended):
    ended("z-older", weights="old")
    ended("a-newer", weights="new")
    assert {"run": "a-newer", "weights_sha256": "new"} == reference.find_reference(ended("stormy", restarts=1))


VIRTUAL = {"bitwise_elastic": 6}


@pytest.mark.parametrize(
    ("other", "mine", "found"),
    [
        *(({"config": config}, {}, True) for config in ({"log_every": 1}, {"checkpoint_every": 5})),
        *(({"config": config}, {}, True) for config in ({"keep_checkpoints": 1}, {"steps_per_loop": 7})),
        ({"evaluator": True}, {}, True),
        ({"workers": 0, "strategy": "one"}, {"workers": 0, "strategy": "one"}, True),
        ({"workers": 0, "strategy": "one"}, {"workers": 0, "strategy": "mirrored"}, False),
        *(({"config": config}, {}, False) for config in ({"seed": 2}, {"global_batch": 96}, {"augment": True})),
        *((topology, {}, False) for topology in ({"workers": 2}, {"workers": 0}, {"devices": 2})),
        *(({"version": version}, {}, False) for version in ("2", None)),
        *(({"state": state}, {}, False) for state in ("failed", "stopped")),
        ({"code": "b"}, {}, False),
        ({"restarts": 1}, {}, False),
        # With virtual shards the number of replicas changes no bit.
        ({"workers": 2, "config": VIRTUAL}, {"config": VIRTUAL}, True),
        ({"workers": 0, "devices": 2, "config": VIRTUAL}, {"config": VIRTUAL}, True),
        ({"workers": 0, "strategy": "one", "config": VIRTUAL}, {"config": VIRTUAL}, True),
        ({"config": VIRTUAL}, {"config": {"bitwise_elastic": 4}}, False),
    ],
    ids=str,
)
def test_a_run_that_may_have_other_bits_is_not_a_reference(ended, make_run, other, mine, found):
    write_json(make_run("running", workers=1).config, CONFIG)  # it has not ended
    ended("calm", **other)
    run = ended("stormy", **mine)
    assert found is (reference.find_reference(run) is not None)
    assert found is (reference.same_bits(run) is not None)  # it is not its own reference


@pytest.mark.parametrize(
    ("both", "mine", "same", "verdict"),
    [
        ({}, {"restarts": 4}, True, "the same bits as"),
        ({}, {"weights": "def", "restarts": 4}, False, "NOT those of"),
        *(({}, {"state": state}, None, "") for state in ("failed", "stopped")),
        ({"ps": 1}, {}, None, ""),
        ({"config": {"script": "train.py", "arguments": []}, "weights": None}, {}, None, ""),
    ],
)
def test_bits_are_compared_with_the_reference_run_s(ended, both, mine, same, verdict):
    ended("calm", **both)
    run = ended("stormy", **both | mine)  # restarts after 2, 3, 4 and 5 s
    assert reference.find_reference(run) is not None
    assert same is reference.same_bits(run)
    run.event("chief", "fault", kind="kill")
    faults, *weights = reference.fault_lines(run)
    assert ("3.50 s (median), 5.00 s" in faults) is ("restarts" in mine)
    assert verdict in "".join(weights)
    assert bool(verdict) is bool(weights)


@pytest.mark.parametrize("smaller", ["scaled", "left out"])
@pytest.mark.parametrize(("shards", "weights", "same"), [(0, "def", None), (6, "def", False), (6, "abc", True)])
def test_another_number_of_workers_repeats_the_bits_of_virtual_shards_alone(ended, shards, weights, same, smaller):
    ended("calm", config={"bitwise_elastic": shards})
    run = ended("stormy", config={"bitwise_elastic": shards}, weights=weights)
    if smaller == "scaled":
        run.event("chief", "scaled", workers_before=2, workers_after=1)
    else:
        run.begin_generation(1, task="worker-0", left_out=["worker-0"])
    assert same is reference.same_bits(run)
