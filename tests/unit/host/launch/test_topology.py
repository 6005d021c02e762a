"""The cluster of a request: stages of a pipeline, workers that may be missing; and what does not go with them."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract import compatibility, spec
from cluster.contract.run import launch_records
from cluster.host.launch import planning
from cluster.host.launch.plan import Plan, estimate_memory
from cluster.host.launch.planning import build_cluster, check_elastic_batch
from cluster.host.launch.resuming import inherit_topology
from cluster.host.nvidia import Placement
from cluster.host.options.request import Request
from cluster.host.runtime.resources import Memory
from cluster.system.errors import UsageError
from cluster.system.json_files import write_json

STAGED: dict[str, Any] = {"global_batch": 192, "micro_batches": 4, "loop": "custom", "source": "memory"}


def cluster(**options: Any) -> spec.ClusterSpec:
    return build_cluster(Request(strategy="pipeline", **options))


@pytest.mark.parametrize(
    ("options", "tasks", "devices"),
    [
        ({"stages": 4}, 4, 1),
        ({"workers": 1}, 2, 1),
        ({"stages": 2, "workers": 1}, 2, 1),
        ({"stages": 3, "workers": 0}, 1, 3),
        ({"workers": 0, "devices": 2}, 1, 2),
        ({"stages": 1}, 1, 1),
    ],
)
def test_each_stage_is_a_task_or_a_device_of_the_only_one(options, tasks, devices):
    built = cluster(**options)
    assert (tasks, devices, tasks * devices) == (len(built.tasks), built.devices, built.stages)
    assert 1 == built.replicas


@pytest.mark.parametrize(("workers", "stages", "pipelines"), [(3, 2, 2), (5, 2, 3), (5, 3, 2), (1, 1, 2)])
def test_as_many_tasks_as_several_pipelines_have_are_those(workers, stages, pipelines):
    built = cluster(workers=workers, stages=stages)
    assert (stages, pipelines, pipelines) == (built.stages, built.pipelines, built.replicas)
    assert built == launch_records.cluster(built.to_json())
    again = build_cluster(inherit_topology(Request(resume="run"), built))
    assert (built.stages, pipelines) == (again.stages, again.pipelines)
    assert 4 == build_cluster(inherit_topology(Request(resume="run", stages=4, workers=3), built)).stages
    with pytest.raises(UsageError):
        compatibility.check_stages(built, STAGED | {"pipeline": {"schedule": "pipedream"}})


def test_a_stream_is_refused():
    """See `tests/differential/refused.py` for other refusals."""
    compatibility.check_stages(cluster(stages=2), STAGED)
    with pytest.raises(UsageError):
        compatibility.check_stages(cluster(stages=2), STAGED | {"source": "stream"})


def test_a_plan_names_the_command_that_prepares_its_data():
    planned: Any = SimpleNamespace(payload=SimpleNamespace(script=""), data="", config={"dataset": "mnist"})
    assert "`invoke data.prepare --name mnist`" in (estimate_memory(planned) or {})["unknown"]


def test_what_each_stage_does_by_itself_is_accepted():
    apart = {"init_from": "before", "freeze": "embedding", "metrics": "mine:metrics"}
    compatibility.check_stages(cluster(stages=2), STAGED | apart | {"optimizer": {"name": "adam", "ema": 0.99}})
    compatibility.check_stages(cluster(stages=2, workers=0), STAGED | {"callbacks": "tutorial"})  # one has all of it


@pytest.mark.parametrize(
    "config", [{"pipeline": {"remat": True}}, {"pipeline": {"schedule": "1f1b"}}, {"pipeline": {"cut": "logits"}}]
)
def test_what_only_a_pipeline_has_is_refused_without(config):
    alone = spec.build(workers=0)
    compatibility.check_stages(alone, {"global_batch": 192})
    with pytest.raises(UsageError):
        compatibility.check_stages(alone, {"global_batch": 192} | config)
    compatibility.check_stages(alone, {"global_batch": 192} | config, previous=config)  # it continues without stages


@pytest.mark.parametrize(
    ("options", "task_bytes", "gpu_bytes", "expected"),
    [
        ({"stages": 2}, 0, 0, 0),
        ({"stages": 2}, 1000 * 2**20, 0, 400 * 2**20),  # TensorFlow takes 600 MiB
        ({"stages": 4, "workers": 0}, 1000 * 2**20, 0, 100 * 2**20),
        ({"stages": 2}, 2**20, 0, 1),
        ({"stages": 2}, 1000 * 2**20, 16 * 2**30, 16 * 2**30),
    ],
)
def test_a_stage_may_hold_its_share_of_a_task_s_memory_or_a_gpu_s(options, task_bytes, gpu_bytes, expected):
    planned = SimpleNamespace(
        cluster=cluster(**options), memory=Memory(task_bytes=task_bytes), gpus=Placement(memory_bytes=gpu_bytes)
    )
    assert expected == Plan.stage_memory_bytes.fget(planned)  # type: ignore[attr-defined]


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
        check_elastic_batch({"min_workers": least, "grow": False}, cluster, config)
        return
    with pytest.raises(UsageError, match=f"--min-workers {least}: .* {replicas} replicas") as refused:
        check_elastic_batch({"min_workers": least, "grow": False}, cluster, config)
    batch = int(str(refused.value).partition("--global-batch ")[2].split(",")[0])
    check_elastic_batch({"min_workers": least, "grow": False}, cluster, config | {"global_batch": batch})


def test_the_plan_says_which_workers_it_can_lose(resolved):
    plan = planning.plan(Request(min_workers=1, grow=True, runtime="local", tensorboard_port="0"))
    assert {"min_workers": 1, "grow": True} == plan.elastic == plan.to_json()["elastic"]
    assert any("--bitwise-elastic" in note for note in plan.notes)
    assert None is planning.plan(Request(runtime="local", tensorboard_port="0")).to_json()["elastic"]


@pytest.mark.parametrize(
    ("topology", "requested", "kept"),
    [
        ({"workers": 3}, {}, {"min_workers": 2, "grow": True}),
        ({"workers": 3}, {"workers": 1}, {"min_workers": 1, "grow": True}),
        ({"workers": 3}, {"min_workers": 1}, {"min_workers": 1, "grow": True}),
        ({"workers": 2, "ps": 1}, {}, {}),
        ({"workers": 0}, {}, {}),
    ],
)
def test_a_resumed_run_keeps_what_was_requested_of_it(resolved, make_run, topology, requested, kept):
    run = make_run(**topology)
    write_json(run.control / "started.json", run.load_started().to_json() | {"min_workers": 2, "grow": True})
    write_json(run.summary, {"state": "stopped"})
    assert kept == planning.plan(Request(resume=run.name, runtime="local", trust=True, **requested)).elastic
