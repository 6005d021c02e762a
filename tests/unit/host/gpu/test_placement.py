"""Which task gets which GPUs: equally many, none twice; which requests are refused; and the output of `nvidia-smi`."""

import pytest

from cluster.contract import spec
from cluster.host import nvidia
from cluster.host.nvidia import Gpu, GpuRequest, Machine, Placement
from cluster.system.errors import EXIT_FAILED, EXIT_PREREQUISITE, ClusterError, UsageError

MIG = "MIG-a8948c89-3b61-8676-26bb-7dbd2d1c9af0"
NONSENSE = ["two", "0", "-1", "1.5", "0,,1", ",", "0,-1", "0,$(id)", "MIG-$(id),", "1٣", "99999", "ALL", "0,0"]
OTHER_MIG = "MIG-d4c28c2e-7c26-847f-0316-909e3bbbe9ea"


def placed(words: str, **topology: object) -> Placement:
    requested = nvidia.parse_gpus(words)
    assert requested
    return nvidia.place_gpus(requested, nvidia.read_machine(requested.text), spec.build(**topology))


def groups(given: Placement) -> list[str]:
    return [",".join(ids) for ids in given.ids.values()]


@pytest.mark.parametrize(
    ("host", "words", "workers", "expected"),
    [
        ("1-h100", "all", 0, ["0"]),
        ("8-h100-nvswitch", "7,1,6,0", 1, ["0,1", "6,7"]),  # whatever their order
        ("8-h100-nvswitch", "5,", 0, ["5"]),
        ("8-a100-pcie-bridges", "1,2,3,4,5,0", 2, ["0,1", "2,3", "4,5"]),
        ("8-a100-pcie-bridges", "0,2,3,1", 1, ["0,1", "2,3"]),
        ("8-a100-pcie-bridges", "0,2,4,5", 1, ["0,2", "4,5"]),
        ("3-mixed", "1,2", 0, ["1,2"]),
        ("3-mixed", "0,1,2", 2, ["0", "1", "2"]),  # where they were named
        ("2-a100-mig", "1", 0, ["1"]),  # the one that is whole
        ("2-a100-mig", MIG, 0, [MIG]),
        ("2-l4-no-topology", "2", 1, ["0", "1"]),
    ],
)
def test_tasks_get_equally_many(nvidia_smi, host, words, workers, expected):
    nvidia_smi(host)
    given = placed(words, workers=workers)
    assert expected == groups(given)
    assert given.memory_bytes >= 2**30 or words == MIG  # of an instance it is not known
    assert ((host, words) == ("3-mixed", "0,1,2")) == bool(given.notes)  # GPUs of several models


@pytest.mark.parametrize("words", [*NONSENSE, "0,1\n", "0, 1"])
def test_words_that_make_no_sense_are_refused(words):
    with pytest.raises(UsageError, match="--gpus"):
        nvidia.parse_gpus(words)
    assert nvidia.parse_gpus("none") is nvidia.parse_gpus("") is None


@pytest.mark.parametrize(
    ("host", "words", "workers", "why"),
    [
        ("2-h100-nvl", "3", 0, "there are 2 to choose from"),
        ("2-h100-nvl", "0,2", 0, "there is no GPU 2 here"),
        ("2-h100-nvl", "MIG-1", 0, "there is no GPU MIG-1 here"),
        ("2-h100-nvl", "all", 2, "use fewer workers"),
        ("8-h100-nvswitch", "6", 3, "use --gpus 4 or 8"),
        ("8-h100-nvswitch", "all", 2, "use --gpus 6"),
        ("8-h100-nvswitch", "0,1,2", 1, "name 2 or 4"),
        ("2-a100-mig", "0,1", 0, "MIG mode"),
        ("2-a100-mig", "2", 0, r"there are 1 to choose from \(1 are in MIG mode"),
        ("2-a100-mig", f"{MIG},{OTHER_MIG}", 1, "MIG instances cannot train together"),
        ("2-a100-mig", f"{MIG},1", 1, "MIG instances cannot train together"),
    ],
)
def test_what_a_machine_cannot_give_is_refused(nvidia_smi, host, words, workers, why):
    nvidia_smi(host)
    with pytest.raises(UsageError, match=why):
        placed(words, workers=workers)


@pytest.mark.parametrize(("words", "workers"), [("0,1", 1), ("3", 2)])
def test_gpus_of_another_run_are_left_alone(words, workers):
    busy = {"1": "theirs", "3": "theirs"}
    requested = nvidia.parse_gpus(words)
    machine = Machine(tuple(Gpu(gpu, "a model", 80_000) for gpu in "0123"), (), frozenset())
    assert requested
    with pytest.raises(UsageError, match="other runs|'theirs'"):
        nvidia.place_gpus(requested, machine, spec.build(workers), busy)
    assert ["0", "2"] == groups(nvidia.place_gpus(GpuRequest("--gpus 2", count=2), machine, spec.build(1), busy))
    with pytest.raises(UsageError, match="other runs"):
        nvidia.place_gpus(GpuRequest("--gpus all"), machine, spec.build(1), dict.fromkeys("0123", "theirs"))


@pytest.mark.parametrize(
    ("recorded", "workers", "expected"),
    [
        ("4", 3, ["0", "1", "2", "3"]),
        ("4", 1, ["0", "1"]),  # as many for each task, whatever they were in all
        ("4,5,6,7", 1, ["4", "5"]),  # never another one than was named
    ],
)
def test_a_resumed_run_keeps_its_gpus_for_each_task(nvidia_smi, recorded, workers, expected):
    nvidia_smi("8-h100-nvswitch")
    requested = nvidia.choose_request("", {"gpus": recorded}, 1)
    assert requested
    assert expected == groups(nvidia.place_gpus(requested, nvidia.read_machine("-"), spec.build(workers)))


NVLINKS = {"2-a100-mig": 1, "2-h100-nvl": 1, "3-mixed": 1, "8-a100-pcie-bridges": 4, "8-h100-nvswitch": 28}
"""How many pairs NVLink connects; none on the other hosts."""


@pytest.mark.parametrize("host", [*NVLINKS, "1-h100", "2-l4-no-topology"])
def test_every_gpu_of_a_host_is_found_and_every_pair_that_nvlink_connects(nvidia_smi, host):
    nvidia_smi(host)
    machine = nvidia.read_machine("--gpus all")
    assert [str(index) for index in range(int(host.partition("-")[0]))] == [gpu.id for gpu in machine.gpus]
    assert all(gpu.memory_mib > 15000 for gpu in machine.gpus)
    assert 2 * NVLINKS.get(host, 0) == len(machine.nvlinks)
    assert machine.nvlinks == {(other, one) for one, other in machine.nvlinks if one != other}


def test_incomplete_tables_are_read_as_far_as_possible_and_indices_as_numbers():
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\tN/A\tN/A\nGPU1\tNV4\t X \n"
    assert {("0", "1"), ("1", "0")} == nvidia.parse_nvlinks(text)
    assert set() == nvidia.parse_nvlinks("Not supported\n")
    text = "".join(f"{index}, NVIDIA L4, 23034, Disabled\n" for index in (10, 9, 0))
    assert ["0", "9", "10"] == [gpu.id for gpu in nvidia.parse_inventory(text)]


def test_mig_is_reported_with_its_instances_of_which_parameter_servers_workers_may_have_one_each(nvidia_smi):
    nvidia_smi("2-a100-mig")
    assert [MIG, OTHER_MIG] == groups(placed(f"{OTHER_MIG},{MIG}", workers=1, ps=1))
    machine = nvidia.read_machine("--gpus all")
    assert [True, False] == [gpu.mig for gpu in machine.gpus]
    assert [("MIG 3g.20gb", MIG), ("MIG 3g.20gb", OTHER_MIG)] == [(one.model, one.id) for one in machine.instances]


@pytest.mark.parametrize(
    ("script", "exit_code", "why"),
    [
        (None, EXIT_PREREQUISITE, "nvidia-smi is not installed"),
        ("echo 'No devices were found'; exit 6", EXIT_PREREQUISITE, "No devices were found"),
        ("echo 'NVIDIA-SMI has failed because' >&2; exit 9", EXIT_PREREQUISITE, "NVIDIA-SMI has failed because"),
        ("exit 9", EXIT_PREREQUISITE, "no GPU was found"),
        ("exit 0", EXIT_PREREQUISITE, "lists no GPU"),
        ("exec /bin/sleep 60", EXIT_PREREQUISITE, "did not answer"),
        ("echo '0, [Unknown Error], NVIDIA L4'", EXIT_FAILED, "0, [Unknown Error], NVIDIA L4"),
    ],
)
def test_a_machine_without_gpus_is_reported(tmp_path, monkeypatch, script, exit_code, why):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setattr(nvidia, "ANSWER_TIMEOUT_S", 0.2 if "sleep" in script else 30)
    with pytest.raises(ClusterError) as refused:
        nvidia.read_machine("--gpus 4")
    assert exit_code == refused.value.exit_code
    assert why in str(refused.value)
    assert 1 == len(str(refused.value).splitlines())
