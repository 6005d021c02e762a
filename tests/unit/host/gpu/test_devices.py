"""What `nvidia-smi` says of a machine's GPUs, read: which there are, and which are neighbours."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.host.gpu import devices
from cluster.system.errors import EXIT_FAILED, EXIT_PREREQUISITE, ClusterError, PrerequisiteError

RECORDED = Path(__file__).parents[2] / "nvidia"
HOSTS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())

NvidiaSmi = Callable[[str], None]


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


@pytest.mark.parametrize(
    ("host", "pair", "near"),
    [
        ("8-h100-nvswitch", "03", (18, devices.PATHS["NODE"])),  # one NUMA node
        ("8-h100-nvswitch", "34", (18, devices.PATHS["SYS"])),  # two
        (
            "8-v100-cube-mesh",
            "03",
            (2, devices.PATHS["NODE"]),
        ),  # from the processors: there is no column of NUMA nodes
        ("8-v100-cube-mesh", "04", (2, devices.PATHS["SYS"])),
        ("8-v100-cube-mesh", "05", (0, devices.PATHS["SYS"])),
        ("8-a100-pcie-bridges", "01", (12, devices.PATHS["NODE"])),
        ("8-a100-pcie-bridges", "02", (0, devices.PATHS["NODE"])),
        ("4-h100-pcie", "02", (0, devices.PATHS["PIX"])),
        ("2-l4-no-topology", "01", (0, 0)),
    ],
)
def test_neighbours_are_distinguished(nvidia_smi, host, pair, near):
    nvidia_smi(host)
    machine = devices.machine("--gpus all")
    assert near == machine.closeness(*pair) == machine.closeness(*reversed(pair))


def test_paths_are_ordered_as_nvidia_smi_s_legend_has_them():
    legend = (RECORDED / "8-h100-nvswitch" / "topo.txt").read_text().partition("Self")[2]
    assert sorted(devices.PATHS, key=devices.PATHS.__getitem__) == [
        line.split()[0] for line in legend.splitlines() if " = Connection" in line and "NV#" not in line
    ]


def test_columns_cut_by_blanks_are_read_as_those_cut_by_tabs():
    text = (RECORDED / "8-h100-nvswitch" / "topo.txt").read_text()
    assert devices.neighbours(text) == devices.neighbours(text.replace("\t", "    "))
    assert "0" == devices.neighbours(text)[1]["3"]
    older = text.replace("NUMA Affinity", "something else")
    assert "0-55,112-167" == devices.neighbours(older)[1]["3"]


def test_what_is_not_known_is_no_neighbourhood():
    links, nodes = devices.neighbours(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\tN/A\tN/A\nGPU1\tNV4\t X \n"
    )
    assert ({("0", "1"): "NV4", ("1", "0"): "NV4"}, {}) == (links, nodes)
    machine = devices.Machine((), (), links, nodes)
    assert (4, devices.PATHS["SYS"]) == machine.closeness("0", "1")
    assert ({}, {}) == devices.neighbours("Not supported\n")


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
        (
            None,
            "no GPU was found on this machine (nvidia-smi is not installed); install NVIDIA's driver, or",
        ),
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
