"""GPUs in the doctor: every check reports what it found, good or bad, with a fix, and measures where asked to."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from cluster.contract.findings import Finding
from cluster.host.checks import doctor, gpu_image, gpu_settings
from cluster.host.checks.gpu_image import BUILD
from cluster.host.checks.gpu_settings import settings
from cluster.host.gpu import devices
from cluster.host.gpu.devices import Machine
from cluster.host.launch import planning
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE, PrerequisiteError, UsageError
from tests.conftest import NVIDIA
from tests.support.command_line import exit_code
from train.bandwidth import bus_bandwidth

INFO = '{"Runtimes": {"runc": {}, "nvidia": {}}, "CDISpecDirs": []}'
CDI = '{"Runtimes": {}, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}'
NEITHER = '{"Runtimes": {"runc": {}}}'
PAIR = Machine((), links={("0", "1"): "NV18", ("1", "0"): "NV18"})
SEEN = {"devices": [f"/dev/nvidia{i}" for i in range(8)], "missing": [], "shared_bytes": 2**30}
SEEN |= {"error": "", "count": 8, "cuda": 12090}


def engine_that(*, info: str = INFO, image: str = "exit 0", run: str = f"echo '{json.dumps(SEEN)}'") -> str:
    """Return the script of a `docker` of which these answers are asked."""
    return (
        f"case \"$*\" in\n'info --format {{{{json .}}}}') echo '{info}';;\ninfo*) echo '\"27.5.1\"';;\n"
        f"compose*) echo 2.32.1;;\nimage*) {image};;\nrun*) {run};;\nesac"
    )


@pytest.fixture
def toolkit_installed(tmp_path) -> Callable[[], None]:
    """Puts an `nvidia-ctk` next to the `docker` that is on the PATH."""

    def put() -> None:
        program = tmp_path / "bin" / "nvidia-ctk"
        program.write_text('#!/bin/sh\necho "NVIDIA Container Toolkit CLI version 1.17.8"\necho "commit: f202b80"\n')
        program.chmod(0o755)

    return put


def examine() -> dict[str, Finding]:
    return {found.check: found for found in gpu_settings.examine()}


def recorded(host: str) -> gpu_settings.Settings:
    return settings((NVIDIA / host / "settings.csv").read_text())


def changed(setting: str, *values: str) -> gpu_settings.Settings:
    """Return the settings of a good host, with these values on its first GPUs."""
    report = [dict(gpu) for gpu in recorded("8-h100-nvswitch")]
    for gpu, value in zip(report, values, strict=False):
        gpu[setting] = value
    return report


def test_a_machine_without_gpus_lacks_nothing(docker):
    calls = docker("exit 1")
    assert [Finding("gpus", "ok", "none: no nvidia-smi on this machine")] == gpu_settings.examine()
    assert "" == calls.read_text()


def test_a_good_host_is_ok(docker, nvidia_smi, toolkit_installed, monkeypatch):
    calls = docker(engine_that())
    toolkit_installed()
    nvidia_smi("8-h100-nvswitch")
    monkeypatch.setattr(gpu_settings, "_shared_bytes", lambda: 2**33)
    found = examine()
    assert {"ok"} == {finding.state for finding in found.values()}
    assert {""} == {finding.fix for finding in found.values()}
    (run,) = (call for call in calls.read_text().splitlines() if call.startswith("run "))
    for word in ("--rm", "--gpus=all", "--shm-size=1gb", "--read-only", "--network=none", "--cap-drop=ALL"):
        assert word in run.split()
    assert "--entrypoint=python tf-cluster/train:gpu -c" in run


def test_a_mixed_host_is_reported_with_what_to_use(docker, nvidia_smi):
    docker("exit 1")
    nvidia_smi("3-mixed")
    found = examine()
    assert "--gpus 1,2" in found["gpus"].fix
    for check in ("gpus", "gpu driver", "gpu persistence", "gpu ecc", "gpu clocks", "gpu toolkit", "gpu image"):
        assert "warning" == found[check].state, check
    assert "GPU 0,1,2" in found["gpu persistence"].detail
    assert "GPU 2" in found["gpu ecc"].detail
    assert "2040" not in found["gpu clocks"].detail  # the highest clocks differ, but not those of one model


def test_instances_an_old_driver_and_memory_errors_are_reported(docker, nvidia_smi):
    docker("exit 1")
    nvidia_smi("2-a100-mig")
    found = examine()
    states = {check: found[check].state for check in ("gpu mig", "gpu driver", "gpu ecc")}
    assert {"gpu mig": "warning", "gpu driver": "failed", "gpu ecc": "failed"} == states


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("525.60.12", "failed"),
        ("470.256.02", "failed"),
        ("", "failed"),
        ("525.60.13", "warning"),
        ("555.42.01", "warning"),
        ("555.42.02", "ok"),
        ("1000.1", "ok"),
    ],
)
def test_the_driver_is_compared_by_its_numbers(version, state):
    assert state == gpu_settings.driver(changed("driver_version", version)).state


@pytest.mark.parametrize("none", ["[N/A]", "[Not Supported]", "N/A"])
def test_what_a_gpu_does_not_report_is_no_problem(none):
    report = [dict.fromkeys(gpu, none) | {"index": gpu["index"], "name": "L4"} for gpu in recorded("8-h100-nvswitch")]
    checks = (gpu_settings.persistence, gpu_settings.mig, gpu_settings.memory_errors, gpu_settings.clocks)
    assert {"ok"} == {check(report).state for check in checks}


def test_one_gpu_alone_of_its_model_is_named_as_a_list():
    assert gpu_settings.models(changed("name", *"abcdefgh")[:2]).fix.endswith("--gpus 0,")


@pytest.mark.parametrize("text", ["", "No devices were found", "a, b\n1, 2\nUnable to determine the device handle\n"])
def test_output_that_is_no_table_reports_no_gpu(text):
    assert [] == settings(text)


def test_nvidia_smi_without_a_gpu_is_the_only_finding(docker, tmp_path):
    docker("exit 1")
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "No devices were found"\nexit 6\n')
    program.chmod(0o755)
    (found,) = gpu_settings.examine()
    assert ("warning", "nvidia-smi reports none: No devices were found") == (found.state, found.detail)


def test_fields_that_a_driver_does_not_know_are_left_out(docker, tmp_path):
    docker("exit 1")
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "*clocks.applications.graphics*) echo 'Field \"clocks.applications.graphics\" is not a valid field to query.'\n"
        "exit 2;;\n*) echo 'index, name, power.limit [W]'; echo '0, H100, 700.00';;\nesac\n"
    )
    program.chmod(0o755)
    assert (0, "index, name, power.limit [W]\n0, H100, 700.00\n") == gpu_settings.query()


@pytest.mark.parametrize(("size", "state"), [(2**30, "ok"), (64 * 2**20, "warning"), (0, "warning")])
def test_shared_memory_must_be_enough_for_nccl(size, state):
    assert state == gpu_settings.shared_memory(size).state


@pytest.mark.parametrize(
    ("version", "ways", "state"),
    [("1.17.8", ["cdi"], "ok"), ("1.17.8", [], "failed"), ("", [], "failed"), ("1.17.8", None, "warning")],
)
def test_the_toolkit_must_be_there_and_known_to_the_engine(version, ways, state):
    found = gpu_settings.container_toolkit(version, ways)
    assert (state, state != "ok") == (found.state, bool(found.fix))


def test_an_engine_that_knows_only_cdi_is_asked_by_cdi(docker, nvidia_smi):
    calls = docker(engine_that(info=CDI))
    nvidia_smi("8-h100-nvswitch")
    found = examine()
    assert found["gpu toolkit"].detail.endswith("--gpu-runtime cdi")
    assert "ok" == found["gpu image"].state
    assert " --device=nvidia.com/gpu=all " in calls.read_text()
    assert "--gpus" not in calls.read_text()


def test_an_image_that_is_not_built_is_reported_with_its_command(docker, nvidia_smi):
    calls = docker(engine_that(image="exit 1"))
    nvidia_smi("8-h100-nvswitch")
    found = examine()["gpu image"]
    assert ("warning", "tf-cluster/train:gpu is not built") == (found.state, found.detail)
    assert "invoke image.build --accelerator gpu" == found.fix
    assert "\nrun " not in calls.read_text()


def test_a_container_that_hangs_is_removed(docker, nvidia_smi, monkeypatch):
    calls = docker(engine_that(run="exec /bin/sleep 600"))
    nvidia_smi("8-h100-nvswitch")
    monkeypatch.setattr(gpu_image, "PROBE_TIMEOUT_S", 0.5)
    found = examine()["gpu image"]
    assert ("failed", True) == (found.state, "docker run did not answer in 0.5 s" in found.detail)
    (run,) = (call for call in calls.read_text().splitlines() if call.startswith("run "))
    (name,) = (word.removeprefix("--name=") for word in run.split() if word.startswith("--name="))
    assert f"rm --force {name}" == calls.read_text().splitlines()[-1]


def seen(**changes: object) -> str:
    """Return what a container prints that sees something else than a good one."""
    return "a warning\n" + json.dumps(SEEN | changes)


@pytest.mark.parametrize(
    ("code", "text", "state", "detail"),
    [
        (0, seen(), "ok", "CUDA 12.9"),
        (0, seen(missing=["libnccl.so.2: cannot open"]), "failed", "libnccl.so.2: cannot open"),
        (0, seen(count=7), "failed", "7 GPUs seen"),
        (0, seen(count=0, devices=[], error="no CUDA-capable device"), "failed", "no CUDA-capable"),
        (0, seen(error="driver version is insufficient"), "failed", "driver version is insufficient"),
        (0, seen(shared_bytes=2**26), "failed", "64 MiB"),
        (125, "docker: Error\nno device driver with capabilities gpu", "failed", "no device driver"),
        (1, "", "failed", "no output"),
        (0, "something else", "failed", "'something else'"),
        (0, "[1]", "failed", "'[1]'"),
    ],
)
def test_what_a_container_sees_is_judged(code, text, state, detail):
    found = gpu_image.judge_image(code, text, 8)
    assert state == found.state
    assert detail in found.detail


def test_what_runs_inside_reports_a_place_without_cuda_too():
    done = subprocess.run([sys.executable, "-c", gpu_image._PROBE], capture_output=True, text=True, check=True)
    assert {"devices", "missing", "shared_bytes"} <= json.loads(done.stdout).keys()


def test_an_engine_that_may_not_lift_limits_is_not_to_be_configured():
    text = "docker: Error response from daemon: error setting rlimit type 8: operation not permitted: unknown"
    assert "CAP_SYS_RESOURCE" in gpu_image.judge_image(125, text, 1).fix
    assert "nvidia-ctk" in gpu_image.judge_image(125, "docker: no device driver", 1).fix


def test_gpus_cut_into_instances_are_not_expected_whole(docker, nvidia_smi):
    docker(engine_that(run=f"echo '{json.dumps(SEEN | {'count': 1})}'"))
    nvidia_smi("2-a100-mig")
    assert "ok" == examine()["gpu image"].state


# The bandwidth of an all-reduce


def measured(devices: int) -> str:
    sizes = [{"mib": 64, "seconds": 0.001, "bus_gb_s": 101.26}, {"mib": 512, "seconds": 0.004, "bus_gb_s": 230.04}]
    return json.dumps({"devices": [f"GPU:{index}" for index in range(devices)], "sizes": sizes})


@pytest.fixture(autouse=True)
def no_runs(monkeypatch, tmp_path):
    """A folder without runs, and an environment without TensorFlow for GPUs."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))

    def without_cuda() -> None:
        raise PrerequisiteError("tensorflow-cpu")

    monkeypatch.setattr(devices, "check_environment", without_cuda)


@pytest.mark.parametrize(("devices", "gb_s"), [(1, 0.0), (2, 2.0), (4, 3.0), (8, 3.5)])
def test_the_bus_carries_a_tensor_almost_twice(devices, gb_s):
    assert gb_s == bus_bandwidth(1e9, 0.5, devices)


def test_it_is_measured_in_the_image_on_the_gpus_that_a_plan_would_use(docker, nvidia_smi):
    calls = docker(engine_that(run=f"echo 'NCCL version 2.32.3'; echo '{measured(4)}'; echo 'NCCL WARN'"))
    nvidia_smi("8-h100-nvswitch")
    found = gpu_image.examine_bandwidth("4")
    assert "ok" == found.state
    assert "101.3 at 64 MiB, 230.0 at 512 MiB" in found.detail
    (run,) = (call for call in calls.read_text().splitlines() if call.startswith("run "))
    assert ' --gpus="device=0,1,2,3" ' in run
    assert " --env=GPUS_GIVEN=4 " in run
    assert run.endswith("--entrypoint=python tf-cluster/train:gpu -m train.bandwidth --devices 4")


def test_an_engine_that_knows_only_cdi_is_given_each_gpu(docker, nvidia_smi):
    calls = docker(engine_that(info=CDI, run=f"echo '{measured(2)}'"))
    nvidia_smi("8-h100-nvswitch")
    assert "ok" == gpu_image.examine_bandwidth("2,5").state
    assert " --device=nvidia.com/gpu=2 --device=nvidia.com/gpu=5 " in calls.read_text()
    assert "--gpus" not in calls.read_text()


def test_without_the_image_it_runs_in_an_environment_with_cuda(docker, nvidia_smi, monkeypatch, tmp_path):
    calls = docker(engine_that(run="exit 1", image="exit 1"))
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


@pytest.mark.parametrize("script", [engine_that(run="exit 1", image="exit 1"), engine_that(info=NEITHER), "exit 1"])
def test_where_nothing_can_measure_it_the_image_is_the_fix(docker, nvidia_smi, script):
    docker(script)
    nvidia_smi("8-h100-nvswitch")
    found = gpu_image.examine_bandwidth()
    assert ("failed", BUILD) == (found.state, found.fix)


@pytest.mark.parametrize(
    ("host", "gpus", "state"),
    [
        ("8-h100-nvswitch", "3,", "ok"),  # alone it has nothing to reduce
        ("8-h100-nvswitch", "", "failed"),  # a run trains on one of them
        ("", "", "failed"),
    ],
)
def test_where_there_is_nothing_to_measure_no_container_starts(docker, nvidia_smi, monkeypatch, host, gpus, state):
    calls = docker("exit 1")
    if host:
        nvidia_smi(host)
    monkeypatch.setattr(planning, "busy", lambda: {"0": "fashion"})
    assert state == gpu_image.examine_bandwidth(gpus).state
    assert "" == calls.read_text()


@pytest.mark.parametrize("requested", ["none", "some"])
def test_what_is_not_understood_is_refused(requested):
    with pytest.raises(UsageError, match=f"--gpus '?{requested}"):
        gpu_image.examine_bandwidth(requested)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (124, "docker run did not answer in 300 s"),
        (1, "Traceback\nerror: all-reduce of 64 MiB gave [1.0], expected"),
        (1, ""),
        (0, "nonsense"),
        (0, "[1]"),
        (0, '{"devices": ["GPU:0", "GPU:1"], "sizes": []}'),
        (0, measured(2).replace("GPU", "CPU")),
        (0, measured(1)),
    ],
)
def test_an_answer_without_a_bandwidth_is_a_failure(code, text):
    assert "failed" == gpu_image.judge_bandwidth(code, text, PAIR, ("0", "1")).state


def test_the_connections_are_named_if_they_are_known(nvidia_smi):
    nvidia_smi("8-a100-pcie-bridges")
    found = gpu_image.judge_bandwidth(0, measured(3), devices.machine("-"), ("0", "1", "7"))
    assert " over NV12, SYS: " in found.detail
    assert "over" not in gpu_image.judge_bandwidth(0, measured(2), Machine(()), ("0", "1")).detail


def call_doctor(monkeypatch: pytest.MonkeyPatch, **options: object) -> int:
    """Call `invoke doctor` on a machine that lacks nothing; return its exit code."""
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("python", "ok", "3.11")])
    return exit_code("doctor", **options)


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
