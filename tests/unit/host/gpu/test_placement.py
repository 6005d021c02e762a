"""Which task gets which GPUs: neighbours, equally many, none twice; and what is refused."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contract import spec
from cluster.host.gpu import devices, placement
from cluster.host.gpu.devices import Gpu, Machine
from cluster.host.gpu.placement import GpuRequest, Placement
from cluster.system.errors import EXIT_USAGE, UsageError

NvidiaSmi = Callable[[str], None]

MIG = "MIG-a8948c89-3b61-8676-26bb-7dbd2d1c9af0"
OTHER_MIG = "MIG-d4c28c2e-7c26-847f-0316-909e3bbbe9ea"


def placed(words: str, per_task: str = "", **topology: object) -> Placement:
    """Return who gets what on the host that `nvidia-smi` reports."""
    requested = placement.parse(words, per_task)
    assert requested
    return placement.place(requested, devices.machine(requested.text, with_instances=True), spec.build(**topology))


def groups(given: Placement) -> list[str]:
    """Return each task's ids as `0,1`, chief first."""
    return [",".join(ids) for ids in given.ids.values()]


# Neighbours


@pytest.mark.parametrize(
    ("host", "words", "per_task", "workers", "expected"),
    [
        ("1-h100", "all", "", 0, ["0"]),
        ("1-h100", "1", "", 0, ["0"]),
        ("2-h100-nvl", "all", "", 1, ["0", "1"]),
        ("2-a100-pcie", "all", "", 0, ["0,1"]),
        ("8-h100-nvswitch", "4", "", 3, ["0", "1", "2", "3"]),  # of one NUMA node
        ("8-h100-nvswitch", "all", "", 3, ["0,1", "2,3", "4,5", "6,7"]),
        ("8-h100-nvswitch", "all", "", 0, ["0,1,2,3,4,5,6,7"]),
        ("8-h100-nvswitch", "all", "2", 0, ["0,1"]),
        ("8-h100-nvswitch", "2,3,6,7", "", 1, ["2,3", "6,7"]),
        ("8-h100-nvswitch", "7,1,6,0", "", 1, ["0,1", "6,7"]),  # whatever their order
        ("8-h100-nvswitch", "5,", "", 0, ["5"]),
        ("8-h100-nvswitch", "", "3", 1, ["0,1,2", "4,5,6"]),  # a task's own come first: 3 and 4 are apart
        ("8-a100-nvswitch", "6", "", 1, ["0,1,2", "4,5,6"]),
        ("8-a100-pcie-bridges", "1,2,3,4,5,0", "", 2, ["0,1", "2,3", "4,5"]),
        ("8-a100-pcie-bridges", "0,2,4,5", "", 1, ["0,2", "4,5"]),
        ("8-v100-cube-mesh", "4", "", 1, ["0,3", "1,2"]),  # two links in a pair
        ("8-v100-cube-mesh", "all", "", 3, ["0,3", "1,2", "4,7", "5,6"]),
        ("8-v100-cube-mesh", "4", "", 0, ["0,1,2,3"]),
        ("8-v100-cube-mesh", "all", "", 1, ["0,1,2,3", "4,5,6,7"]),
        ("4-a100-nvlink", "2", "", 0, ["0,1"]),
        ("4-h100-pcie", "all", "", 1, ["0,2", "1,3"]),  # by PCIe switch
        ("4-h100-pcie", "2", "", 1, ["0", "2"]),
        ("3-mixed", "2", "", 1, ["1", "2"]),  # of one model
        ("3-mixed", "1,2", "", 0, ["1,2"]),
        ("2-a100-mig", "1", "", 0, ["1"]),  # the one that is whole
        ("2-a100-mig", MIG, "", 0, [MIG]),
        ("2-l4-no-topology", "2", "", 1, ["0", "1"]),
    ],
)
def test_tasks_get_neighbours(nvidia_smi, host, words, per_task, workers, expected):
    nvidia_smi(host)
    given = placed(words, per_task, workers=workers)
    assert expected == groups(given)
    assert given.memory_bytes >= 2**30 or words == MIG  # of an instance it is not known


@pytest.mark.parametrize(
    ("links", "workers", "per_task", "expected"),
    [
        ({"12": "NV4", "23": "NV4", "13": "NV4"}, 1, 1, ["1", "2"]),  # the first of all is no neighbour
        ({"03": "NV2", "01": "NV1", "02": "NV1", "12": "NV4"}, 2, 1, ["0", "1", "2"]),  # nor is its nearest the best
        ({"01": "NV4", "04": "PIX", "05": "PIX"}, 1, 2, ["0,1", "4,5"]),  # a task near the other, inside it is the same
    ],
)
def test_a_machine_without_order_is_searched(links, workers, per_task, expected):
    ids = "012345"[: 6 if per_task > 1 else 4]
    levels = {pair: links.get("".join(sorted(pair)), "SYS") for pair in itertools.permutations(ids, 2)}
    machine = Machine(tuple(Gpu(gpu, gpu, "a model", 1) for gpu in ids), (), levels)
    assert expected == groups(placement.place(GpuRequest("--gpus", per_task=per_task), machine, spec.build(workers)))


def test_only_the_chief_and_the_workers_get_any(nvidia_smi):
    nvidia_smi("8-h100-nvswitch")
    given = placed("6", workers=2, ps=2, evaluator=True)
    assert {"chief": ("0", "1"), "worker-0": ("2", "3"), "worker-1": ("4", "5")} == given.ids
    assert () == given.of("ps-0") == given.of("evaluator")


def test_parameter_servers_workers_may_have_an_instance_each(nvidia_smi):
    nvidia_smi("2-a100-mig")
    assert [MIG, OTHER_MIG] == groups(placed(f"{OTHER_MIG},{MIG}", workers=1, ps=1))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """A machine with a random way between each two of its GPUs."""
    ids = [str(index) for index in range(draw(st.integers(1, 9)))]
    ways = st.sampled_from([*devices.PATHS, "NV1", "NV2", "NV4", "NV18", "PHB"])
    links = {}
    for one, other in itertools.combinations(ids, 2):
        links[one, other] = links[other, one] = draw(ways)
    nodes = {gpu: draw(st.sampled_from("01")) for gpu in ids}
    return Machine(tuple(Gpu(gpu, f"GPU-{gpu}", "a model", 80_000) for gpu in ids), (), links, nodes)


@settings(deadline=None)  # others use this machine, too
@given(machine=machines(), workers=st.integers(0, 8), per_task=st.integers(1, 9))
def test_gpus_are_shared_out_evenly_and_none_twice(machine, workers, per_task):
    requested, cluster = GpuRequest("--gpus", per_task=per_task), spec.build(workers)
    count, there = (1 + workers) * per_task, len(machine.gpus)
    if count > there:
        with pytest.raises(UsageError, match=f"and this machine has {there}; request fewer"):
            placement.place(requested, machine, cluster)
        return
    given = placement.place(requested, machine, cluster)
    assert [task.name for task in cluster.tasks] == list(given.ids)
    assert {per_task} == {len(ids) for ids in given.ids.values()}
    used = [gpu for ids in given.ids.values() for gpu in ids]
    assert count == len(set(used)) == len(used)
    assert set(used) <= {gpu.id for gpu in machine.gpus}
    assert all(list(ids) == sorted(ids, key=int) for ids in given.ids.values())
    assert given == placement.place(requested, machine, cluster)
    backwards = Machine(machine.gpus, (), dict(reversed(machine.links.items())), machine.nodes)
    assert given == placement.place(requested, backwards, cluster)


@settings(deadline=None)
@given(
    islands=st.integers(1, 4),
    size=st.integers(1, 4),
    per_task=st.integers(1, 4),
    workers=st.integers(0, 7),
    draw=st.randoms(use_true_random=False),
)
def test_no_task_crosses_islands_that_it_could_stay_in(islands, size, per_task, workers, draw):
    """NVLink inside the islands alone, and the GPUs of an island anywhere among the ids."""
    ids = [str(index) for index in range(islands * size)]
    draw.shuffle(ids)  # type: ignore[attr-defined]
    island = {gpu: at // size for at, gpu in enumerate(ids)}
    links = {
        (one, other): "NV4" if island[one] == island[other] else "SYS" for one, other in itertools.permutations(ids, 2)
    }
    in_order = sorted(ids, key=int)
    machine = Machine(tuple(Gpu(gpu, gpu, "a model", 1) for gpu in in_order), (), links)
    if workers + 1 > islands * (size // per_task):
        return  # some task has to cross
    given = placement.place(GpuRequest("--gpus", per_task=per_task), machine, spec.build(workers))
    for ids_of_task in given.ids.values():
        assert 1 == len({island[gpu] for gpu in ids_of_task})
    needed = -(-(workers + 1) // (size // per_task))
    assert needed == len({island[gpu] for ids_of_task in given.ids.values() for gpu in ids_of_task})


# What is refused


@pytest.mark.parametrize(
    "words",
    [
        "two",
        "0",
        "-1",
        "1.5",
        "0,,1",
        ",",
        "0,-1",
        "0,1\n",
        "0,$(id)",
        "MIG-$(id),",
        "1٣",
        "0, 1",
        "99999",
        "ALL",
        "0,0",
    ],
)
def test_words_that_make_no_sense_are_refused(words):
    with pytest.raises(UsageError, match="--gpus") as refused:
        placement.parse(words, "")
    assert words in str(refused.value) or repr(words) in str(refused.value)
    assert EXIT_USAGE == refused.value.exit_code


def test_counts_of_a_task_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="--gpus-per-task '0': expected a whole number from 1 to 64"):
        placement.parse("all", "0")
    with pytest.raises(UsageError, match="--gpus none --gpus-per-task 2: none is none for each task; leave one"):
        placement.parse("none", "2")
    assert placement.parse("none", "") is placement.parse("", "") is None


@pytest.mark.parametrize(
    ("host", "words", "per_task", "workers", "why"),
    [
        ("2-h100-nvl", "3", "", 0, "this machine has 2"),
        ("2-h100-nvl", "", "1", 2, "this machine has 2"),
        ("2-h100-nvl", "0,2", "", 0, "there is no GPU 2 here"),
        ("2-h100-nvl", "MIG-1", "", 0, "there is no GPU MIG-1 here"),
        ("2-h100-nvl", "all", "", 2, "use fewer workers"),
        ("8-h100-nvswitch", "6", "", 3, "use --gpus 4 or 8"),
        ("8-h100-nvswitch", "all", "", 2, "use --gpus 6"),
        ("8-h100-nvswitch", "0,1,2", "", 1, "name 2 or 4"),
        ("8-h100-nvswitch", "3,", "", 1, "name 2"),
        ("8-h100-nvswitch", "4", "2", 2, "make 6, not 4"),
        ("8-h100-nvswitch", "0,1,2,3", "1", 1, "make 2, not 4"),
        ("3-mixed", "all", "", 2, "such as --gpus 1,2"),
        ("3-mixed", "3", "", 2, "at most 2 are of one model"),
        ("2-a100-mig", "all", "", 0, "MIG mode"),
        ("2-a100-mig", "0,1", "", 0, "MIG mode"),
        ("2-a100-mig", "2", "", 0, "1 in MIG mode"),
        ("2-a100-mig", f"{MIG},{OTHER_MIG}", "", 1, "MIG instances cannot train together"),
        ("2-a100-mig", f"{MIG},{OTHER_MIG}", "", 0, "MIG instances cannot train together"),
        ("2-a100-mig", f"{MIG},1", "", 1, "MIG instances cannot train together"),
    ],
)
def test_what_a_machine_cannot_give_is_refused(nvidia_smi, host, words, per_task, workers, why):
    nvidia_smi(host)
    with pytest.raises(UsageError, match=why) as refused:
        placed(words, per_task, workers=workers)
    options = [f"--gpus {words}"] * bool(words) + [f"--gpus-per-task {per_task}"] * bool(per_task)
    assert str(refused.value).startswith(f"{' '.join(options)}: ")
    assert 1 == len(str(refused.value).splitlines())


@pytest.mark.parametrize(
    ("words", "workers", "message"),
    [
        ("all", 0, "--gpus all: run 'theirs' trains on GPU 1; use others, or `invoke stop theirs` before this"),
        ("0,1", 1, "--gpus 0,1: run 'theirs' trains on GPU 1; use others"),
        ("3", 2, "--gpus 3: 3 GPUs for 3 tasks, and this machine has 2 besides 2 in use by other runs; request fewer"),
    ],
)
def test_gpus_of_another_run_are_left_alone(nvidia_smi, words, workers, message):
    nvidia_smi("4-a100-nvlink")
    busy = {"1": "theirs", "3": "theirs"}
    requested, machine = placement.parse(words, ""), devices.machine("-")
    assert requested
    with pytest.raises(UsageError) as refused:
        placement.place(requested, machine, spec.build(workers), busy)
    assert str(refused.value).startswith(message)
    assert ["0", "2"] == groups(placement.place(GpuRequest("--gpus 2", count=2), machine, spec.build(1), busy))
    everything = dict.fromkeys("0123", "theirs")
    with pytest.raises(UsageError, match="--gpus 2: run 'theirs' trains on GPU 0; use others"):
        placement.place(GpuRequest("--gpus 2", count=2), machine, spec.build(1), everything)


def test_mixed_models_that_were_named_are_noted(nvidia_smi):
    nvidia_smi("3-mixed")
    given = placed("0,1,2", workers=2)
    assert ["0", "1", "2"] == groups(given)
    assert (
        "the GPUs are of several models (NVIDIA L4: 0; NVIDIA A100 80GB PCIe: 1,2): every synchronous step waits for "
        "the slowest",
    ) == given.notes
    assert () == placed("2", workers=1).notes


def test_a_topology_that_is_not_reported_is_noted(nvidia_smi):
    nvidia_smi("2-l4-no-topology")
    (note,) = placed("2", workers=1).notes
    assert note.startswith("`nvidia-smi topo -m` gave no answer")
    assert () == placed("1", workers=0).notes


# A run that goes on


@pytest.mark.parametrize(
    ("recorded", "workers", "expected"),
    [
        ("4", 3, ["0", "1", "2", "3"]),
        ("4", 1, ["0", "1"]),  # as many for each task, whatever they were in all
        ("", 0, ["0"]),
        ("4,5,6,7", 1, ["4", "5"]),  # never another one than was named
    ],
)
def test_a_run_that_goes_on_keeps_its_gpus_for_each_task(nvidia_smi, recorded, workers, expected):
    nvidia_smi("8-h100-nvswitch")
    requested = placement.requested("", "", {"gpus": recorded}, 1)
    assert requested
    assert expected == groups(placement.place(requested, devices.machine("-"), spec.build(workers)))


def test_a_run_cannot_grow_over_the_gpus_that_were_named(nvidia_smi):
    nvidia_smi("8-h100-nvswitch")
    requested = placement.requested("", "", {"gpus": "4,5"}, 1)
    assert requested
    with pytest.raises(UsageError, match=r"--gpus 4,5 of the run: 3 tasks .* would need 3, and there are 2 to choose"):
        placement.place(requested, devices.machine("-"), spec.build(2))


def test_what_is_asked_for_now_goes_before_what_a_run_had():
    assert placement.requested("none", "", {"gpus": "4"}, 1) is None
    assert placement.requested("", "", {}, 1) is None
    assert GpuRequest("--gpus 2", count=2) == placement.requested("2", "", {"gpus": "4"}, 1)


# How they are handed over


def test_handing_over_has_defaults_and_is_checked():
    assert ("reserve", "WARN") == placement.device_handling("", "")
    assert ("cdi", "INFO") == placement.device_handling("cdi", "info")
    with pytest.raises(
        UsageError, match="--gpu-runtime 'cdy': expected one of reserve, cdi, nvidia; did you mean 'cdi'"
    ):
        placement.device_handling("cdy", "")
    with pytest.raises(UsageError, match="--nccl-debug 'LOUD': expected one of VERSION, WARN, INFO, TRACE"):
        placement.device_handling("", "loud")


def test_the_image_follows_from_the_gpus():
    assert ("cpu", "gpu") == (Placement().accelerator, Placement({"chief": ("0",)}).accelerator)
    assert {} == Placement().to_json()
