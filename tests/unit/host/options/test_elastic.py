"""`--min-workers` and `--grow`: what is refused, what is recorded, and what a run that goes on keeps."""

import pytest

from cluster.contract import spec
from cluster.contract.run.records import Started
from cluster.host.launch import configuration, kubernetes, planning
from cluster.host.options import elastic
from cluster.host.options.request import Request
from cluster.system.errors import EXIT_USAGE, UsageError
from tests.support.launching import CONFIG, refusal


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(min_workers="3"), ["--min-workers 3", "--workers 2"]),
        (Request(min_workers="-1"), ["--min-workers"]),
        (Request(min_workers="one"), ["--min-workers 'one'"]),
        (Request(min_workers="1", workers="0"), ["--min-workers 1", "--workers 0"]),
        (Request(min_workers="0", workers="0"), ["--min-workers 0", "one process"]),
        (Request(min_workers="1", ps="1"), ["--min-workers 1", "parameter servers"]),
        (Request(min_workers="0", strategy="pipeline", stages="3"), ["--min-workers 0", "--strategy pipeline"]),
        (Request(min_workers="1", script="s.py"), ["--min-workers", "script"]),
        (Request(grow=True), ["--grow", "--min-workers"]),
        (Request(grow=True, script="s.py"), ["--grow", "script"]),
    ],
)
def test_a_cluster_that_can_lose_no_worker_is_refused(resolved, request_, named):
    error = refusal(request_)
    assert EXIT_USAGE == error.exit_code
    assert [] == [option for option in named if option not in str(error)], error


@pytest.mark.parametrize(
    ("workers", "least", "config", "replicas"),
    [
        (3, 1, {"global_batch": 128}, 3),  # 4 and 2 divide it, 3 does not
        (2, 0, {"global_batch": 288, "micro_batches": 96}, 2),
        (5, 2, {"global_batch": 120}, None),
        (5, 2, {"global_batch": 300, "micro_batches": 5}, None),
        (4, 3, {"global_batch": 128, "bitwise_elastic": 8}, None),
        (2, 2, {"global_batch": 3}, None),
    ],
)
def test_every_possible_number_of_replicas_must_share_the_batch(workers, least, config, replicas):
    cluster = spec.build(workers)
    if replicas is None:
        elastic.check_batch({"min_workers": least, "grow": False}, cluster, config)
        return
    with pytest.raises(UsageError, match=f"--min-workers {least}: .* {replicas} replicas") as refused:
        elastic.check_batch({"min_workers": least, "grow": False}, cluster, config)
    batch = int(str(refused.value).partition("--global-batch ")[2].split(",")[0])
    elastic.check_batch({"min_workers": least, "grow": False}, cluster, config | {"global_batch": batch})


def test_the_plan_says_what_it_goes_on_without(resolved):
    plan = planning.plan(Request(min_workers="1", grow=True, runtime="local", tensorboard_port="0"))
    assert {"min_workers": 1, "grow": True} == plan.elastic == plan.to_json()["elastic"]
    assert any("1 worker or more" in note for note in plan.to_json()["notes"])
    assert any("--bitwise-elastic" in note for note in plan.notes)
    assert None is planning.plan(Request(runtime="local", tensorboard_port="0")).to_json()["elastic"]


@pytest.mark.parametrize(
    ("request_", "cluster", "kept"),
    [
        (Request(), spec.build(3), {"min_workers": 2, "grow": True}),
        (Request(), spec.build(1), {"min_workers": 1, "grow": True}),
        (Request(min_workers="1"), spec.build(3), {"min_workers": 1, "grow": True}),
        (Request(), spec.build(2, 1), {}),
        (Request(), spec.build(0), {}),
    ],
)
def test_a_run_that_goes_on_keeps_what_was_requested_of_it(request_, cluster, kept):
    assert kept == elastic.parse(request_, cluster, Started(min_workers=2, grow=True))


def test_manifests_carry_it(monkeypatch):
    monkeypatch.setattr(configuration, "resolve", lambda *_, **__: (dict(CONFIG), (), ""))
    request = Request(min_workers="1", tensorboard_port="0")
    started = kubernetes._manifest(request, kubernetes.Place()).started
    assert (1, False) == (started["min_workers"], started["grow"])
