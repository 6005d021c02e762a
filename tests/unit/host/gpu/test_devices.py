"""The output of `nvidia-smi`: which GPUs there are, and how they are connected."""

from pathlib import Path

import pytest

from cluster.host.gpu import devices
from cluster.system.errors import EXIT_FAILED, EXIT_PREREQUISITE, ClusterError, PrerequisiteError

RECORDED = Path(__file__).parents[2] / "nvidia"
HOSTS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())


@pytest.mark.parametrize("host", HOSTS)
def test_every_gpu_of_a_host_is_found(nvidia_smi, host):
    nvidia_smi(host)
    machine = devices.machine("--gpus all")
    ids = [str(index) for index in range(int(host.partition("-")[0]))]
    assert ids == [gpu.id for gpu in machine.gpus]
    assert len(ids) == len({gpu.uuid for gpu in machine.gpus})
    assert all(gpu.uuid.startswith("GPU-") and gpu.memory_mib > 15000 for gpu in machine.gpus)
    expected = {(one, other) for one in ids for other in ids if one != other}
    assert (set() if host.endswith("no-topology") else expected) == set(machine.links)
    assert all(machine.links[other, one] == link for (one, other), link in machine.links.items())


def test_incomplete_tables_are_read_as_far_as_possible():
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\tN/A\tN/A\nGPU1\tNV4\t X \n"
    assert {("0", "1"): "NV4", ("1", "0"): "NV4"} == devices.connections(text)
    assert {} == devices.connections("Not supported\n")


def test_mig_is_reported_and_instances_only_where_they_are_asked_for(nvidia_smi):
    nvidia_smi("2-a100-mig")
    assert [True, False] == [gpu.mig for gpu in devices.machine("--gpus all").gpus]
    assert () == devices.machine("--gpus all").instances
    found = devices.machine("--gpus MIG-1,", with_instances=True).instances
    assert ["MIG 3g.20gb"] * 2 == [one.model for one in found]
    assert ["MIG-a8948c89", "MIG-d4c28c2e"] == [one.id[:12] for one in found]


def test_indices_are_numbers():
    text = "".join(f"{index}, GPU-{index}, NVIDIA L4, 23034, Disabled\n" for index in (10, 9, 0))
    assert ["0", "9", "10"] == [gpu.id for gpu in devices.inventory(text)]


def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an `nvidia-smi` with this script on the PATH."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no GPU was found on this machine (nvidia-smi is not installed); install NVIDIA's driver, or"),
        ("echo 'No devices were found'; exit 6", "no GPU was found on this machine (No devices were found); install "),
        (
            "echo 'NVIDIA-SMI has failed because' >&2; exit 9",
            "no GPU was found on this machine (NVIDIA-SMI has failed because); install",
        ),
        ("exit 9", "no GPU was found on this machine (it says nothing); install NVIDIA's driver"),
        ("exit 0", "nvidia-smi lists no GPU on this machine; use --gpus none, or another machine"),
        ("exec /bin/sleep 60", "no GPU was found on this machine (nvidia-smi did not answer in 0.2 s); install"),
    ],
)
def test_a_machine_without_gpus_is_reported(tmp_path, monkeypatch, script, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        says(tmp_path, monkeypatch, script)
        monkeypatch.setattr(devices, "ANSWER_TIMEOUT_S", 0.2 if "sleep" in script else 30)
    with pytest.raises(PrerequisiteError) as refused:
        devices.machine("--gpus 4")
    assert EXIT_PREREQUISITE == refused.value.exit_code
    assert str(refused.value).startswith("--gpus 4: ")
    assert message in str(refused.value)
    assert 1 == len(str(refused.value).splitlines())


def test_what_cannot_be_read_is_shown(tmp_path, monkeypatch):
    says(tmp_path, monkeypatch, "echo '0, [Unknown Error], NVIDIA L4'")
    with pytest.raises(
        ClusterError, match=r"nvidia-smi printed '0, \[Unknown Error\], NVIDIA L4': expected"
    ) as refused:
        devices.machine("--gpus 4")
    assert EXIT_FAILED == refused.value.exit_code
