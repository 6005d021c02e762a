"""GPUs from the command line to what each task is started with, on recorded hosts and a machine that has none."""

import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cluster.contract.run import provenance
from cluster.host import nvidia
from cluster.host.control import scaling
from cluster.host.image import images
from cluster.host.launch import planning, startup
from cluster.host.launch.plan import Plan, plan_lines
from cluster.host.options.request import Request
from cluster.host.runtime import namespaces, registry, supervisor
from cluster.system.errors import EXIT_USAGE, PrerequisiteError, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.launching import WORKING_ENGINE, Commands, refusal


def ids_of(planned: Plan) -> list[list[int]]:
    return [task["gpus"] for task in planned.to_json()["tasks"]]


def environments(planned: Plan) -> dict[str, dict[str, str]]:
    parts = planned.compose.get("tasks") or planned.compose["services"]
    return {name: part["environment"] for name, part in parts.items()}


@pytest.mark.parametrize(
    ("requested", "strategy", "ids"),
    [
        ({"workers": 0, "gpus": "all"}, "mirrored", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"workers": 0, "gpus": "1"}, "one", [[0]]),
        ({"workers": 3, "gpus": "4"}, "multiworker", [[0], [1], [2], [3]]),
        ({"workers": 3, "gpus": "8"}, "multiworker", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"workers": 3, "gpus": "all", "devices": 2}, "multiworker", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_replicas_are_as_many_as_gpus(resolved, nvidia_smi, requested, strategy, ids):
    nvidia_smi("8-h100-nvswitch")
    planned = planning.plan(Request(runtime="local", **requested))
    assert (strategy, ids) == (planned.cluster.strategy, ids_of(planned))
    assert sum(map(len, ids)) == planned.cluster.replicas


@pytest.mark.parametrize(
    ("requested", "named", "looks"),
    [
        ({"workers": 3, "gpus": "all", "devices": 4}, "--devices 4", True),
        ({"strategy": "one", "gpus": "all"}, "--strategy one", True),
        ({"workers": 4, "gpus": "5"}, "global_batch=192", True),
        ({"gpus": "two"}, "--gpus 'two'", False),
        ({"gpus_per_task": 2}, "--gpus-per-task", False),
        ({"gpus": "1", "strategy": "tpu"}, "--gpus 1 with --strategy tpu", False),
        ({"workers": 1, "devices": 2}, "--devices 2", False),
    ],
)
def test_gpus_that_cannot_be_are_refused_and_words_before_any_is_looked_for(
    resolved, nvidia_smi, monkeypatch, tmp_path, requested, named, looks
):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    nvidia_smi("8-h100-nvswitch")
    if not looks:
        monkeypatch.setattr(nvidia, "ask_nvidia_smi", lambda *words: pytest.fail("nvidia-smi was asked"))
    error = refusal(Request(runtime="local", **requested))
    assert (EXIT_USAGE, True) == (error.exit_code, named in str(error))
    assert not (tmp_path / "runs").exists()


def test_a_process_sees_its_gpus_and_no_other(resolved, nvidia_smi):
    nvidia_smi("8-h100-nvswitch")
    found = environments(planning.plan(Request(workers=1, ps=1, evaluator=True, gpus="4", runtime="local")))
    visible = {name: environment["CUDA_VISIBLE_DEVICES"] for name, environment in found.items()}
    assert {"chief": "0,1", "worker-0": "2,3", "ps-0": "-1", "evaluator": "-1"} == visible
    for name in ("chief", "worker-0"):
        expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "GPUS_GIVEN": "2", "NCCL_DEBUG": "WARN"}
        assert expected.items() <= found[name].items(), name
        assert "true" == found[name]["TF_FORCE_GPU_ALLOW_GROWTH"]
    given = {"CUDA_DEVICE_ORDER", "GPUS_GIVEN", "NCCL_DEBUG", "TF_FORCE_GPU_ALLOW_GROWTH"}
    assert set() == given & {*found["ps-0"], *found["evaluator"]}


@pytest.mark.parametrize("given", ["NCCL_DEBUG=INFO", "NCCL_DEBUG"])
def test_what_nccl_logs_is_the_caller_s_choice(resolved, nvidia_smi, docker, monkeypatch, given):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    docker(WORKING_ENGINE)
    nvidia_smi("8-h100-nvswitch")
    local = planning.plan(Request(workers=0, gpus="1", env=(given,), runtime="local")).compose
    assert "WARN" not in local["tasks"]["chief"]["environment"].values()
    service = planning.plan(Request(workers=0, gpus="1", env=(given,))).compose["services"]["chief"]
    assert service["environment"]["NCCL_DEBUG"] == ("INFO" if "=" in given else None)


@pytest.mark.parametrize("requested", [{}, {"gpus": "none"}])
def test_unless_it_is_asked_for_no_process_sees_a_gpu(resolved, monkeypatch, requested):
    monkeypatch.setattr(nvidia, "ask_nvidia_smi", lambda *words: pytest.fail("nvidia-smi was asked"))
    planned = planning.plan(Request(**requested, runtime="local"))
    assert {"-1"} == {environment["CUDA_VISIBLE_DEVICES"] for environment in environments(planned).values()}
    assert [[], [], []] == ids_of(planned)
    assert "GPU" not in "\n".join(plan_lines(planned.to_json()))


def test_a_start_builds_records_and_continues_with_the_gpu_image(resolved, nvidia_smi, docker, monkeypatch):
    docker(WORKING_ENGINE)
    nvidia_smi("8-h100-nvswitch")
    built, checked, inspected = [], [], []
    monkeypatch.setattr(images, "pending_commands", lambda accelerator: built.append(accelerator) or ["docker build ."])
    monkeypatch.setattr(images, "inspect_image", lambda image: inspected.append(image) or {"image": image})
    monkeypatch.setattr(nvidia, "check_engine", lambda: checked.append(True))
    planned = planning.plan(Request(name="one", workers=1, gpus="4,5,", tensorboard_port="0"))
    startup.start(planned, Commands(), began=time.time())
    startup.list_commands(planned)
    assert (["gpu", "gpu"], [True]) == (built, checked)
    assert ["tf-cluster/train:gpu"] == inspected == [planned.run.load_manifest()["image"]["image"]]
    resumed = planning.plan(Request(resume="one"))
    assert planned.gpus == resumed.gpus
    assert "4,5," == resumed.gpus.requested
    assert planned.gpus.ids == planning.plan(Request(again="one")).gpus.ids
    assert {} == planning.plan(Request(resume="one", gpus="none")).gpus.ids
    assert ("6", "7") == planning.plan(Request(resume="one", workers=0, gpus="6,7")).gpus.of("chief")


def test_a_run_is_scaled_with_as_many_gpus_for_each_task(resolved, nvidia_smi, make_run, monkeypatch):
    nvidia_smi("8-h100-nvswitch")
    run = make_run(workers=1, devices=2)
    write_json(run.control / "started.json", read_json(run.control / "started.json") | {"gpus": {"gpus": "4"}})
    provenance.write_note(run)
    monkeypatch.setattr("cluster.host.launch.teardown.in_progress", lambda run: True)
    monkeypatch.setattr(planning, "in_progress", lambda run: True)
    assert ["0,1", "2,3", "4,5"] == [",".join(ids) for ids in scaling.plan_scaling(run, 2).gpus.ids.values()]
    with pytest.raises(UsageError, match="--gpus 4 of the run"):
        scaling.plan_scaling(run, 5)

    def refuse(sh: object, accelerator: str, *, renew: bool) -> None:
        raise PrerequisiteError(f"no image for {accelerator}")

    planned = SimpleNamespace(runtime=registry.get_runtime("docker"), accelerator="gpu")
    monkeypatch.setattr(scaling, "plan_scaling", lambda *_, **__: planned)
    monkeypatch.setattr(startup, "check_machine", lambda *_, **__: None)
    monkeypatch.setattr(images, "build_images", refuse)
    with pytest.raises(PrerequisiteError, match="no image for gpu"):
        scaling.scale_run(run, Commands(), workers=1)


@pytest.mark.parametrize("runtime", ["local", "docker"])
def test_runs_in_progress_keep_their_gpus(resolved, nvidia_smi, docker, monkeypatch, runtime):
    docker(WORKING_ENGINE)
    nvidia_smi("8-h100-nvswitch")
    requested = {"workers": 1, "gpus": "2", "runtime": runtime, "tensorboard_port": "0"}
    first = planning.plan(Request(name="first", **requested))
    first.run.create()
    write_json(first.run.compose, first.compose)
    write_json(first.run.config, first.config)
    write_json(first.run.cluster, first.cluster.to_json())
    write_json(first.run.control / "started.json", {"gpus": {"gpus": first.gpus.requested}})
    provenance.write_note(first.run)
    assert [[0], [1]] == ids_of(first) == ids_of(planning.plan(Request(name="next", **requested)))
    monkeypatch.setattr(planning, "in_progress", lambda run: run == first.run)
    assert [[2], [3]] == ids_of(planning.plan(Request(name="next", **requested)))
    error = refusal(Request(name="next", **(requested | {"gpus": "1,2"})))
    assert (EXIT_USAGE, True) == (error.exit_code, str(error).startswith("--gpus 1,2: run 'first' trains on GPU 1; "))
    monkeypatch.setattr(namespaces, "refusal", lambda: None)
    scaled = planning.plan(Request(resume="first", runtime=runtime), stops_first=True)
    assert [[0], [1]] == ids_of(scaled)  # its own are free for it
    assert ["GPUs: chief 0; worker-0 1"] == scaled.notes


@pytest.mark.parametrize(
    ("runtimes", "has_hook", "able"),
    [({"runc": {}}, False, False), ({"runc": {}, "nvidia": {}}, False, True), ({}, True, True), (None, False, False)],
)
def test_an_engine_must_be_able_to_hand_over_gpus(docker, runtimes, has_hook, able):
    calls = docker("exit 1" if runtimes is None else f"echo '{json.dumps(runtimes)}'")
    if has_hook:
        (hook := calls.parent / "bin" / nvidia._HOOK).touch()
        hook.chmod(0o755)
    with nullcontext() if able else pytest.raises(PrerequisiteError, match="^--gpus with containers: the engine"):
        nvidia.check_engine()


def test_processes_need_a_tensorflow_with_cuda(resolved, nvidia_smi, monkeypatch):
    nvidia_smi("2-h100-nvl")
    monkeypatch.setattr(supervisor, "start_supervisor", lambda run: None)
    known: list[str] = []
    monkeypatch.setattr(nvidia.metadata, "distributions", lambda name: [each for each in known if each == name])
    planned = planning.plan(Request(name="one", workers=1, gpus="all", runtime="local", tensorboard_port="0"))
    with pytest.raises(PrerequisiteError, match="--gpus with local processes: this environment has tensorflow-cpu"):
        startup.start(planned, Commands(), began=time.time())
    assert not planned.run.path.exists()
    known.append("tensorflow")
    startup.start(planned, Commands(), began=time.time())
    assert planned.run.path.exists()
