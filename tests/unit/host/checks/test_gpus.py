"""GPUs in the doctor: every check reports what it found, good or bad, with a fix."""

import json
import subprocess
import sys

import pytest

from cluster.host.checks import doctor
from cluster.host.runtime.base import Finding


def engine_that(*, runtimes: str = '{"runc": {}, "nvidia": {}}', image: str = "exit 0", run: str) -> str:
    """Return the script of a `docker` that gives these answers."""
    return (
        f"case \"$*\" in\n'info --format {{{{json .Runtimes}}}}') echo '{runtimes}';;\ninfo*) echo '\"27.5.1\"';;\n"
        f"compose*) echo 2.32.1;;\nimage*) {image};;\nrun*) {run};;\nesac"
    )


def sees(count: int) -> str:
    return f"echo '{json.dumps({'count': count, 'error': ''})}'"


def examine() -> dict[str, Finding]:
    return {found.check: found for found in doctor.examine_gpus()}


def test_a_machine_without_gpus_lacks_nothing(docker):
    calls = docker("exit 1")
    assert [Finding("gpus", "ok", "none: no nvidia-smi on this machine")] == doctor.examine_gpus()
    assert "" == calls.read_text()


def test_a_good_host_is_ok(docker, nvidia_smi, monkeypatch):
    calls = docker(engine_that(run=sees(8)))
    nvidia_smi("8-h100-nvswitch")
    monkeypatch.setattr(doctor, "_shared_bytes", lambda: 2**33)
    assert examine() == {
        "gpus": Finding("gpus", "ok", "8 NVIDIA H100 80GB HBM3"),
        "gpu driver": Finding("gpu driver", "ok", "570.133.20: all of CUDA 12.5"),
        "gpu kernels": Finding("gpu kernels", "ok", "compute capability 9.0"),
        "gpu memory": Finding("gpu memory", "ok", "no uncorrected error reported"),
        "shared memory": Finding("shared memory", "ok", "/dev/shm has 8.0 GiB"),
        "gpu image": Finding("gpu image", "ok", "CUDA, cuDNN and NCCL load; GPUs seen: 8"),
    }
    (run,) = (call for call in calls.read_text().splitlines() if call.startswith("run "))
    for word in ("--rm", "--gpus=all", "--shm-size=1gb", "--read-only", "--network=none", "--cap-drop=ALL"):
        assert word in run.split()
    assert "--entrypoint=python tf-cluster/train:gpu -c" in run


def test_a_mixed_host_an_old_driver_and_memory_errors_are_reported(docker, nvidia_smi):
    docker("exit 1")
    nvidia_smi("3-mixed")
    found = examine()
    assert ("warning", "1 NVIDIA L4, 2 NVIDIA A100 80GB PCIe") == (found["gpus"].state, found["gpus"].detail)
    assert "warning" == found["gpu driver"].state
    assert "gpu image" not in found  # no engine answers
    nvidia_smi("2-a100-mig")
    found = examine()
    assert ("failed", "515.105.01: CUDA 12 needs 525.60.13") == (found["gpu driver"].state, found["gpu driver"].detail)
    assert ("failed", True) == (found["gpu memory"].state, "GPU 1 had" in found["gpu memory"].detail)


DRIVERS = {"525.60.12": "failed", "": "failed", "525.60.13": "warning", "555.42.02": "ok", "1000.1": "ok"}
CAPABILITIES = {"5.2": "failed", "6.0": "ok", "9.0": "ok", "[N/A]": "ok", "10.0": "warning", "12.0": "warning"}
SHARED_BYTES = {2**30: "ok", 64 * 2**20: "warning", 0: "warning"}


def test_the_driver_is_compared_by_its_numbers_and_shared_memory_must_be_enough_for_nccl():
    assert DRIVERS == {version: doctor.judge_driver(version).state for version in DRIVERS}
    assert CAPABILITIES == {each: doctor.judge_capabilities([each]).state for each in CAPABILITIES}
    assert "warning" == doctor.judge_capabilities(["9.0", "12.0"]).state
    assert SHARED_BYTES == {size: doctor.judge_shared_memory(size).state for size in SHARED_BYTES}


@pytest.mark.parametrize("said", ["No devices were found", ""])
def test_nvidia_smi_without_a_gpu_is_the_only_finding(docker, tmp_path, said):
    docker("exit 1")
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    (found,) = doctor.examine_gpus()
    assert ("warning", f"nvidia-smi reports none: {said or 'it lists no GPU'}") == (found.state, found.detail)


@pytest.mark.parametrize(
    ("engine", "state", "detail", "fix"),
    [
        ({"runtimes": '{"runc": {}}'}, "failed", "no NVIDIA runtime", ""),
        ({"image": "exit 1"}, "warning", "tf-cluster/train:gpu is not built", doctor.BUILD),
    ],
)
def test_what_containers_lack_is_reported_before_one_is_started(docker, nvidia_smi, engine, state, detail, fix):
    calls = docker(engine_that(**engine, run="exit 1"))
    nvidia_smi("8-h100-nvswitch")
    found = examine()["gpu image"]
    assert (state, True, fix) == (found.state, detail in found.detail, found.fix)
    assert "\nrun " not in calls.read_text()


def test_a_container_that_hangs_is_removed(docker, nvidia_smi, monkeypatch):
    calls = docker(engine_that(run="exec /bin/sleep 600"))
    nvidia_smi("8-h100-nvswitch")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.5)
    found = examine()["gpu image"]
    assert ("failed", True) == (found.state, "docker run did not answer in 0.5 s" in found.detail)
    (run,) = (call for call in calls.read_text().splitlines() if call.startswith("run "))
    (name,) = (word.removeprefix("--name=") for word in run.split() if word.startswith("--name="))
    assert f"rm --force {name}" == calls.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "text", "state", "detail"),
    [
        (0, '{"count": 8, "error": ""}', "ok", "GPUs seen: 8"),
        (0, '{"count": 7, "error": ""}', "failed", "7 GPUs seen, expected 8"),
        (0, '{"count": 0, "error": "no CUDA-capable device"}', "failed", "CUDA reports: no CUDA-capable device"),
        (125, "docker: Error\nno device driver with capabilities gpu", "failed", "fails: no device driver"),
        (1, "", "failed", "no output"),
        (0, "[1]", "failed", "'[1]'"),
    ],
)
def test_what_a_container_sees_is_judged(code, text, state, detail):
    found = doctor.judge_image(code, text, 8)
    assert (state, True) == (found.state, detail in found.detail)


def test_what_runs_inside_names_the_library_that_does_not_load():
    done = subprocess.run([sys.executable, doctor.PROBE], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) if done.returncode == 0 else "lib" in done.stderr.splitlines()[-1]


def test_gpus_cut_into_instances_are_not_expected_whole(docker, nvidia_smi):
    docker(engine_that(run=sees(1)))
    nvidia_smi("2-a100-mig")
    assert "ok" == examine()["gpu image"].state
