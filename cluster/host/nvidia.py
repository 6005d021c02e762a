"""This machine's GPUs and NVLinks according to `nvidia-smi`, and their placement on tasks.

The chief and each worker get the same number of GPUs, all other tasks none.
"""

import re
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from cluster.contract.spec import ClusterSpec, Role, parse_count
from cluster.host.image import engine
from cluster.system import processes
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.messages import counted

QUERY = ("--query-gpu=index,name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
ANSWER_TIMEOUT_S = 30.0
"""Timeout of `nvidia-smi`: the driver takes seconds to wake unused GPUs."""
_HOOK = "nvidia-container-runtime-hook"
CONFIGURE = "`nvidia-ctk runtime configure --runtime=docker` and restart the engine"
_NVLINK = re.compile(r"NV\d+")
_INDEX = re.compile(r"GPU(\d+)")
_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
_INSTANCE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
MAX_GPUS = 1024
NO_DEVICE = "-1"
"""The value of CUDA_VISIBLE_DEVICES that hides all devices."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one instance of a GPU in MIG mode."""

    id: str
    """The index in the order of the PCI bus; for a MIG instance its UUID, the form for CUDA and the engine."""
    model: str
    memory_mib: int
    mig: bool = False
    """Whether the GPU is in MIG mode, in which CUDA sees its instances instead of the whole GPU."""


@dataclass(frozen=True)
class Machine:
    """This machine's GPUs."""

    gpus: tuple[Gpu, ...]
    instances: tuple[Gpu, ...] = ()
    nvlinks: frozenset[tuple[str, str]] = frozenset()
    """The pairs of GPUs that NVLink connects, in both orders; empty if `nvidia-smi topo` failed."""


def ask_nvidia_smi(*words: str) -> tuple[int, str]:
    """Run `nvidia-smi`; return its exit code and output, or the reason for a failure."""
    code, printed, complained = processes.run(["nvidia-smi", *words], ANSWER_TIMEOUT_S)
    return code, printed if code == 0 else printed.strip() or complained.strip()


def read_machine(what: str) -> Machine:
    """Return this machine's GPUs, which the option `what` needs, and its MIG instances."""
    code, text = ask_nvidia_smi(*QUERY)
    if code or not text.strip():
        why = (text.strip() or "nvidia-smi lists no GPU").splitlines()[-1]
        fix = "install NVIDIA's driver, or use --gpus none"
        raise PrerequisiteError(f"{what}: no GPU was found on this machine ({why}); {fix}")
    gpus = parse_inventory(text)
    nvlinks = parse_nvlinks(ask_nvidia_smi("topo", "-m")[1])  # empty if it failed
    listed = ask_nvidia_smi("-L")[1] if any(gpu.mig for gpu in gpus) else ""
    matches = [_INSTANCE.match(line) for line in listed.splitlines()]
    return Machine(gpus, tuple(Gpu(match[2], f"MIG {match[1]}", 0) for match in matches if match), nvlinks)


def parse_inventory(text: str) -> tuple[Gpu, ...]:
    """Parse the GPUs in the output of `nvidia-smi --query-gpu`."""
    gpus = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[0].isdigit():
            expected = "expected index, name, memory and MIG mode; run it to see what is wrong with the driver"
            raise ClusterError(f"nvidia-smi printed {line.strip()[:100]!r}: {expected}")
        index, model, memory, mig = cells
        gpus.append(Gpu(index, model, int(memory) if memory.isdigit() else 0, mig == "Enabled"))
    return tuple(sorted(gpus, key=lambda gpu: int(gpu.id)))


def parse_nvlinks(text: str) -> frozenset[tuple[str, str]]:
    """Parse the pairs of GPUs that NVLink connects from the table of `nvidia-smi topo -m`."""
    rows = [[cell.strip() for cell in line.split("\t")] for line in _UNDERLINE.sub("", text).splitlines()]
    header = next((row[1:] for row in rows if row[1:2] == ["GPU0"]), [])
    linked = set()
    for name, *cells in rows:
        for other, link in zip(header, cells, strict=False):
            pair = _INDEX.fullmatch(name), _INDEX.fullmatch(other)
            if pair[0] and pair[1] and _NVLINK.fullmatch(link):
                linked.add((pair[0][1], pair[1][1]))
    return frozenset(linked)


def check_engine() -> None:
    """Check that the engine can give GPUs to containers."""
    runtimes, _ = engine.ask_info("Runtimes")
    if "nvidia" not in (runtimes or {}) and not shutil.which(_HOOK):
        problem = "with containers: the engine has no NVIDIA runtime, so containers get no GPU"
        raise PrerequisiteError(f"--gpus {problem}; install NVIDIA's container toolkit, then {CONFIGURE}")


def check_environment() -> None:
    """Check that processes of this environment can use GPUs."""
    if not any(metadata.distributions(name="tensorflow")):
        problem = "this environment has tensorflow-cpu, which uses no GPU"
        fix = "use --runtime docker, or an environment with CUDA: set ACCELERATOR=gpu as docs/guides/gpus.md says"
        raise PrerequisiteError(f"--gpus with local processes: {problem}; {fix}")


@dataclass(frozen=True)
class GpuRequest:
    """The requested GPUs, checked as far as possible without information about the machine."""

    text: str
    ids: tuple[str, ...] = ()
    """The GPUs to choose from; empty for all of this machine."""
    count: int = 0
    """The total number of GPUs; 0 for all, or for `per_task` on each task."""
    per_task: int = 0
    """The number of GPUs for each task of a resumed run, which may leave some of `ids` unused."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of a run's tasks."""

    ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The ids of each task's GPUs; a missing task gets none."""
    requested: str = ""
    """`--gpus` as typed, for a resumed run."""
    notes: tuple[str, ...] = ()
    memory_bytes: int = 0
    """The memory of the smallest GPU; 0 if unknown."""

    def of(self, task: str) -> tuple[str, ...]:
        return self.ids.get(task, ())

    def environment(self, task: str, given: Collection[str] = ()) -> dict[str, str]:
        """Return the variables of a task with GPUs on any runtime; `given` are variables that the user has set."""
        if not (ids := self.of(task)):
            return {}
        return {
            "GPUS_GIVEN": str(len(ids)),  # the training program checks that TensorFlow sees as many
            **({} if "NCCL_DEBUG" in given else {"NCCL_DEBUG": "WARN"}),
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # for scripts and parameter-server workers, too
        }


def parse_gpus(gpus: str) -> GpuRequest | None:
    """Parse `--gpus`; None if it requests none."""
    request = GpuRequest(f"--gpus {gpus}")
    if gpus in ("", "none"):
        return None
    if gpus == "all":
        return request
    if re.fullmatch(r"[1-9][0-9]*", gpus):
        return replace(request, count=parse_count("gpus", gpus, 1, MAX_GPUS))
    ids = gpus.removesuffix(",").split(",")
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,3}|MIG-[0-9A-Za-z/-]+", part) for part in ids) or gpus == "0":
        raise UsageError(f"--gpus {gpus!r}: expected none, all, how many such as 4, or ids such as 0,1 or a single 0,")
    if twice := [part for part, times in Counter(ids).items() if times > 1]:
        raise UsageError(f"--gpus {gpus}: GPU {twice[0]} is named more than once; name each GPU once")
    return replace(request, ids=tuple(ids))


def choose_request(gpus: str, recorded: Mapping[str, Any], previous_devices: int) -> GpuRequest | None:
    """Return the current request, or else that of the resumed run."""
    if gpus or not recorded:
        return parse_gpus(gpus)
    # As many GPUs for each task as before, from the same ones if the run named them.
    previous = parse_gpus(recorded["gpus"])
    ids = previous.ids if previous else ()
    return GpuRequest(f"--gpus {recorded['gpus']} of the run", ids, per_task=previous_devices)


def place_gpus(
    request: GpuRequest, machine: Machine, cluster: ClusterSpec, busy: Mapping[str, str] | None = None
) -> Placement:
    """Assign GPUs to tasks, except those in `busy`, on which other runs train, with the names of these runs."""
    tasks = [task.name for task in (*cluster.of(Role.CHIEF), *cluster.of(Role.WORKER))]
    busy = busy or {}
    unused = [gpu for gpu in machine.gpus if not gpu.mig and gpu.id not in busy]
    pool = _named(request, machine, busy) if request.ids else unused
    per_task = _share(request, len(pool), len(machine.gpus) - len(pool), len(tasks))
    if any(gpu.id.startswith("MIG-") for gpu in pool) and (per_task > 1 or cluster.kind.collective):
        why = "MIG instances cannot train together (a process sees one, and NCCL connects none)"
        raise UsageError(f"{request.text}: {why}; use one with --workers 0, whole GPUs, or parameter servers")
    groups = _share_out([gpu.id for gpu in pool], len(tasks), per_task, machine)
    used = [gpu for gpu in pool if any(gpu.id in group for group in groups)]
    models = ", ".join(f"{gpu.id} {gpu.model}" for gpu in used)
    mixed = len({gpu.model for gpu in used}) > 1
    notes = (f"the GPUs are of several models ({models}): every synchronous step waits for the slowest",)
    memory_bytes = min(gpu.memory_mib for gpu in pool) * 2**20
    return Placement(dict(zip(tasks, groups, strict=True)), notes=notes if mixed else (), memory_bytes=memory_bytes)


def _named(request: GpuRequest, machine: Machine, busy: Mapping[str, str]) -> list[Gpu]:
    known = {gpu.id: gpu for gpu in (*machine.gpus, *machine.instances)}
    for name in request.ids:
        if name not in known:
            raise UsageError(f"{request.text}: there is no GPU {name} here; this machine has {', '.join(known)}")
        if name in busy:
            raise UsageError(f"{request.text}: run {busy[name]!r} trains on GPU {name}; use others, or stop that run")
        if known[name].mig:
            fix = f"name one by its UUID from `nvidia-smi -L`, or end the mode: `nvidia-smi -i {name} -mig 0`"
            raise UsageError(f"{request.text}: GPU {name} is in MIG mode, so only its instances can be used; {fix}")
    return [gpu for gpu in known.values() if gpu.id in request.ids]


def _share(request: GpuRequest, available: int, unusable: int, num_tasks: int) -> int:
    tasks = "the chief alone" if num_tasks == 1 else f"{num_tasks} tasks (the chief and the workers)"
    count = request.per_task * num_tasks or request.count or len(request.ids) or available
    if count > available or not count:
        besides = f" ({unusable} are in MIG mode or in use by other runs)" if unusable and not request.ids else ""
        problem = f"{tasks} would need {max(count, num_tasks)} GPUs, and there are {available} to choose from{besides}"
        raise UsageError(f"{request.text}: {problem}; request fewer, or use fewer workers")
    if count % num_tasks:
        fewer, more = count // num_tasks * num_tasks, (count // num_tasks + 1) * num_tasks
        fits = " or ".join(str(number) for number in (fewer, more) if number and (number <= available or request.ids))
        use = ("name " if request.ids else "use --gpus ") + fits if fits else "use fewer workers"
        raise UsageError(f"{request.text}: {tasks} cannot share {counted(count, 'GPU')} evenly; {use}")
    return count // num_tasks


def _share_out(ids: Sequence[str], num_tasks: int, per_task: int, machine: Machine) -> list[tuple[str, ...]]:
    """Return a group of GPUs for each task, in the order of their ids, except that NVLink groups stay together."""
    left, groups = list(ids), []
    for _ in range(num_tasks):
        group = [left.pop(0)]
        while len(group) < per_task:
            linked = (gpu for gpu in left if all((gpu, member) in machine.nvlinks for member in group))
            group.append(next(linked, left[0]))
            left.remove(group[-1])
        groups.append(tuple(sorted(group, key=ids.index)))
    return groups
