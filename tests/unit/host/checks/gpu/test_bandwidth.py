"""The doctor's all-reduce: between which GPUs, where it runs, and what is made of its answer. Without TensorFlow."""

import json
import sys

import pytest
from invoke import Exit, MockContext

import tasks
from cluster.contract.findings import Finding
from cluster.host.checks import doctor, gpu_image
from cluster.host.checks.gpu_image import BUILD
from cluster.host.gpu import devices
from cluster.host.gpu import devices as gpus
from cluster.host.gpu.devices import Machine
from cluster.host.launch import planning
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE, PrerequisiteError, UsageError
from train.bandwidth import bus_bandwidth

PAIR = Machine((), links={("0", "1"): "NV18", ("1", "0"): "NV18"})


def measured(devices: int) -> str:
    sizes = [{"mib": 64, "seconds": 0.001, "bus_gb_s": 101.26}, {"mib": 512, "seconds": 0.004, "bus_gb_s": 230.04}]
    return json.dumps({"devices": [f"GPU:{index}" for index in range(devices)], "sizes": sizes})


def engine_that(run: str, *, runtimes: str = '{"nvidia": {}}', image: str = "exit 0") -> str:
    info = f'{{"Runtimes": {runtimes}, "DiscoveredDevices": [{{"ID": "nvidia.com/gpu=0"}}]}}'
    return (
        f"case \"$*\" in\n'info --format {{{{json .}}}}') echo '{info}';;\ninfo*) echo '\"27.5.1\"';;\n"
        f"compose*) echo 2.32.1;;\nimage*) {image};;\nrun*) {run};;\nesac"
    )


@pytest.fixture(autouse=True)
def no_runs(monkeypatch, tmp_path):
    """A folder without runs, and an environment without TensorFlow for GPUs."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(devices, "check_environment", without_cuda)


def without_cuda() -> None:
    """Say that this environment has no TensorFlow with CUDA."""
    raise PrerequisiteError("tensorflow-cpu")


@pytest.mark.parametrize(("devices", "gb_s"), [(1, 0.0), (2, 2.0), (4, 3.0), (8, 3.5)])
def test_the_bus_carries_a_tensor_almost_twice(devices, gb_s):
    assert gb_s == bus_bandwidth(1e9, 0.5, devices)


def test_it_is_measured_in_the_image_on_the_gpus_that_a_plan_would_use(docker, nvidia_smi):
    calls = docker(engine_that(f"echo 'NCCL version 2.32.3'; echo '{measured(4)}'; echo 'NCCL WARN'"))
    nvidia_smi("8-h100-nvswitch")
    found = gpu_image.examine_bandwidth("4")
    assert ("ok", "GPU 0,1,2,3 over NV18: bus GB/s 101.3 at 64 MiB, 230.0 at 512 MiB") == (found.state, found.detail)
    (run,) = (call for call in calls.read_text().splitlines() if call.startswith("run "))
    assert ' --gpus="device=0,1,2,3" ' in run
    assert " --env=GPUS_GIVEN=4 " in run
    assert run.endswith("--entrypoint=python tf-cluster/train:gpu -m train.bandwidth --devices 4")


def test_all_gpus_are_measured_unless_some_are_asked_for(docker, nvidia_smi):
    docker(engine_that(f"echo '{measured(8)}'"))
    nvidia_smi("8-h100-nvswitch")
    assert gpu_image.examine_bandwidth().detail.startswith("GPU 0,1,2,3,4,5,6,7 over NV18: ")


def test_an_engine_that_knows_only_cdi_is_given_each_gpu(docker, nvidia_smi):
    calls = docker(engine_that(f"echo '{measured(2)}'", runtimes="{}"))
    nvidia_smi("8-h100-nvswitch")
    assert "ok" == gpu_image.examine_bandwidth("2,5").state
    assert " --device=nvidia.com/gpu=2 --device=nvidia.com/gpu=5 " in calls.read_text()
    assert "--gpus" not in calls.read_text()


def test_without_the_image_it_runs_in_an_environment_with_cuda(docker, nvidia_smi, monkeypatch, tmp_path):
    calls = docker(engine_that("exit 1", image="exit 1"))
    nvidia_smi("8-h100-nvswitch")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $GPUS_GIVEN $*" >{tmp_path}/seen\n'
        f"echo '{measured(2)}'\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(devices, "check_environment", lambda: None)
    assert "ok" == gpu_image.examine_bandwidth("4,6").state
    assert "4,6 PCI_BUS_ID 2 -m train.bandwidth --devices 2\n" == (tmp_path / "seen").read_text()
    assert "\nrun " not in calls.read_text()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (engine_that("exit 1", image="exit 1"), "tf-cluster/train:gpu is not built, and this environment has no"),
        (
            engine_that("exit 1").replace("nvidia", "other"),
            "no engine provides GPUs to containers, and this environment has no",
        ),
        ("exit 1", "no engine provides GPUs to containers, and this environment has no"),
    ],
)
def test_where_nothing_can_measure_it_the_image_is_the_fix(docker, nvidia_smi, script, why):
    docker(script)
    nvidia_smi("8-h100-nvswitch")
    found = gpu_image.examine_bandwidth()
    assert ("failed", BUILD) == (found.state, found.fix)
    assert why in found.detail


def test_one_gpu_alone_has_nothing_to_reduce(docker, nvidia_smi):
    calls = docker(engine_that("exit 1"))
    nvidia_smi("8-h100-nvswitch")
    assert Finding("gpu bandwidth", "ok", "GPU 3 alone: nothing to all-reduce") == gpu_image.examine_bandwidth("3,")
    assert "" == calls.read_text()


def test_gpus_that_a_run_trains_on_are_left_alone(docker, nvidia_smi, monkeypatch):
    calls = docker(engine_that("exit 1"))
    nvidia_smi("8-h100-nvswitch")
    monkeypatch.setattr(planning, "busy", lambda: {"0": "fashion"})
    found = gpu_image.examine_bandwidth()
    assert "failed" == found.state
    assert "fashion" in found.detail
    assert "" == calls.read_text()


def test_a_machine_without_gpus_fails_what_was_asked_for(docker):
    docker("exit 1")
    found = gpu_image.examine_bandwidth()
    assert ("failed", True) == (found.state, "--bandwidth: no GPU was found on this machine" in found.detail)


@pytest.mark.parametrize("requested", ["none", "some"])
def test_what_is_not_understood_is_refused(requested):
    with pytest.raises(UsageError, match=f"--gpus '?{requested}"):
        gpu_image.examine_bandwidth(requested)


@pytest.mark.parametrize(
    ("code", "text", "detail"),
    [
        (124, "docker run did not answer in 300 s", "between GPU 0,1 fails: docker run did not answer"),
        (1, "Traceback\nerror: all-reduce of 64 MiB gave [1.0], expected", "fails: error: all-reduce of 64 MiB gave"),
        (1, "", "fails: no output"),
        (0, "nonsense", "'nonsense' instead of"),
        (0, "[1]", "'[1]' instead of"),
        (0, '{"devices": ["GPU:0", "GPU:1"], "sizes": []}', "instead of 2 GPUs"),
        (0, measured(2).replace("GPU", "CPU"), "measured on CPU:0, CPU:1 instead of 2 GPUs"),
        (0, measured(1), "measured on GPU:0 instead of 2 GPUs"),
    ],
)
def test_an_answer_without_a_bandwidth_is_a_failure(code, text, detail):
    found = gpu_image.judge_bandwidth(code, text, PAIR, ("0", "1"))
    assert "failed" == found.state
    assert detail in found.detail
    assert "NCCL_DEBUG=INFO" in found.fix


def test_the_connections_are_named_if_they_are_known(nvidia_smi):
    nvidia_smi("2-h100-nvl")
    assert gpu_image.judge_bandwidth(0, measured(2), gpus.machine("-"), ("0", "1")).detail.startswith(
        "GPU 0,1 over NV12: "
    )
    nvidia_smi("8-a100-pcie-bridges")
    assert " over NV12, SYS: " in gpu_image.judge_bandwidth(0, measured(3), gpus.machine("-"), ("0", "1", "7")).detail
    assert "over" not in gpu_image.judge_bandwidth(0, measured(2), Machine(()), ("0", "1")).detail


def call_doctor(monkeypatch: pytest.MonkeyPatch, **options: object) -> int:
    """Call `invoke doctor` on a machine that lacks nothing; return its exit code."""
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("python", "ok", "3.11")])
    with pytest.raises(Exit) as ended:
        tasks.ns["doctor"](MockContext(), **options)
    return ended.value.code


def test_the_doctor_measures_only_where_asked(monkeypatch, capsys):
    requested: list[str] = []
    monkeypatch.setattr(
        gpu_image, "examine_bandwidth", lambda gpus: requested.append(gpus) or Finding("gpu bandwidth", "failed", "-")
    )
    assert 0 == call_doctor(monkeypatch)
    assert EXIT_PREREQUISITE == call_doctor(monkeypatch, bandwidth=True, gpus="0,1")
    assert ["0,1"] == requested
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed  gpu bandwidth")
    assert EXIT_USAGE == call_doctor(monkeypatch, gpus="0,1")
