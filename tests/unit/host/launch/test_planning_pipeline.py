"""How many tasks and devices a number of stages is, and what does not go with stages: before anything starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract import compatibility, spec
from cluster.host.gpu.placement import Placement
from cluster.host.launch.plan import Plan
from cluster.host.options.request import Request
from cluster.host.options.topology import topology
from cluster.host.runtime.resources import Memory
from cluster.system.errors import UsageError

CONFIG: dict[str, Any] = {"global_batch": 192, "micro_batches": 4, "loop": "custom", "source": "memory"}


def cluster(**options: Any) -> spec.ClusterSpec:
    return spec.build(**topology(Request(strategy="pipeline", **options)))


@pytest.mark.parametrize(
    ("options", "tasks", "devices"),
    [
        ({"stages": "4"}, 4, 1),
        ({"workers": "1"}, 2, 1),
        ({"stages": "2", "workers": "1"}, 2, 1),
        ({"stages": "3", "workers": "0"}, 1, 3),
        ({"workers": "0", "devices": "2"}, 1, 2),
        ({"stages": "1"}, 1, 1),
    ],
)
def test_each_stage_is_a_task_or_a_device_of_the_only_one(options, tasks, devices):
    built = cluster(**options)
    assert (tasks, devices, tasks * devices) == (len(built.tasks), built.devices, built.stages)
    assert 1 == built.replicas


@pytest.mark.parametrize(
    ("workers", "stages", "pipelines"), [("3", "2", 2), ("5", "2", 3), ("5", "3", 2), ("1", "1", 2)]
)
def test_as_many_tasks_as_several_pipelines_have_are_those(workers, stages, pipelines):
    built = cluster(workers=workers, stages=stages)
    assert (int(stages), pipelines, pipelines) == (built.stages, built.pipelines, built.replicas)
    assert built == spec.ClusterSpec.from_json(built.to_json())
    again = spec.build(**topology(Request(resume="run"), built))
    assert (built.stages, pipelines) == (again.stages, again.pipelines)
    with pytest.raises(UsageError):
        compatibility.check_stages(built, CONFIG | {"pipeline": {"schedule": "pipedream"}})


def test_callbacks_need_a_task_that_has_the_whole_model():
    compatibility.check_stages(cluster(stages="2", workers="0"), CONFIG | {"callbacks": "tutorial"})


def test_a_run_that_goes_on_may_have_another_number_of_stages():
    before = cluster(stages="2")
    again = topology(Request(resume="run", stages="4"), before)
    assert 4 == spec.build(**again).stages
    assert 2 == spec.build(**topology(Request(resume="run"), before)).stages


@pytest.mark.parametrize(
    "request_",
    [
        Request(stages="2"),
        Request(stages="2", strategy="multiworker"),
        Request(stages="3", workers="1", strategy="pipeline"),
        Request(stages="2", workers="2", strategy="pipeline"),
        Request(stages="3", workers="0", devices="2", strategy="pipeline"),
        Request(stages="2", ps="1", strategy="pipeline"),
        Request(workers="2", devices="2", strategy="pipeline"),
        Request(stages="0", strategy="pipeline"),
        Request(stages="two", strategy="pipeline"),
    ],
)
def test_stages_that_the_topology_has_not_are_refused(request_):
    with pytest.raises(UsageError):
        spec.build(**topology(request_))


@pytest.mark.parametrize(
    "config",
    [
        {"loop": "fit"},
        {"source": "stream"},
        {"callbacks": "tutorial"},
        {"pipeline": {"schedule": "pipedream"}, "precision": "fp16"},
        {"pipeline": {"schedule": "pipedream", "remat": True}},
        {"pipeline": {"schedule": "pipedream"}, "optimizer": {"clip_norm": 1.0}},
        {"optimizer": {"name": "mine:optimizer"}},
    ],
)
def test_what_a_pipeline_has_not_is_refused(config):
    compatibility.check_stages(cluster(stages="2"), CONFIG)
    with pytest.raises(UsageError):
        compatibility.check_stages(cluster(stages="2"), CONFIG | config)


def test_what_each_stage_does_by_itself_is_accepted():
    apart = {"init_from": "before", "freeze": "embedding", "metrics": "mine:metrics", "best": {"metric": "eval_loss"}}
    compatibility.check_stages(cluster(stages="2"), CONFIG | apart | {"optimizer": {"name": "adam", "ema": 0.99}})


@pytest.mark.parametrize(
    "config",
    [{"pipeline": {"remat": True}}, {"pipeline": {"schedule": "1f1b"}}, {"pipeline": {"partition_by": "measured"}}],
)
def test_what_only_a_pipeline_has_is_refused_without(config):
    alone = spec.build(workers=0)
    compatibility.check_stages(alone, {"global_batch": 192})
    with pytest.raises(UsageError):
        compatibility.check_stages(alone, {"global_batch": 192} | config)
    compatibility.check_stages(alone, {"global_batch": 192} | config, previous=config)  # it goes on without stages


def test_options_of_a_pipeline_reach_the_training():
    request = Request(micro_batches="8", schedule="1f1b", remat=True, cut="dense,logits", partition_by="measured")
    words = " ".join(request.training())
    for expected in (
        "--micro-batches 8",
        "--pipeline.schedule 1f1b",
        "--pipeline.cut dense,logits",
        "--pipeline.partition-by measured",
        "--pipeline.remat",
    ):
        assert expected in words


@pytest.mark.parametrize(
    ("options", "task_bytes", "gpu_bytes", "expected"),
    [
        ({"stages": "2"}, 0, 0, 0),
        ({"stages": "2"}, 1000 * 2**20, 0, 400 * 2**20),  # TensorFlow takes 600 MiB
        ({"stages": "4", "workers": "0"}, 1000 * 2**20, 0, 100 * 2**20),
        ({"stages": "2"}, 2**20, 0, 1),
        ({"stages": "2"}, 1000 * 2**20, 16 * 2**30, 16 * 2**30),
    ],
)
def test_a_stage_may_hold_its_share_of_a_task_s_memory_or_a_gpu_s(options, task_bytes, gpu_bytes, expected):
    planned = SimpleNamespace(
        cluster=cluster(**options), memory=Memory(task_bytes=task_bytes), gpus=Placement(memory_bytes=gpu_bytes)
    )
    assert expected == Plan.stage_memory_bytes.fget(planned)  # type: ignore[attr-defined]
