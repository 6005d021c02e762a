"""Which task gets which GPUs: the chief and the workers the same number each, all other tasks none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.contract.run.records import GPUS
from cluster.contract.spec import MAX_DEVICES, ClusterSpec, Role, parse_count
from cluster.host.gpu.devices import Gpu, Machine
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import counted

DEVICE_REQUEST = "reserve"
DEVICE_REQUESTS = (DEVICE_REQUEST, "cdi", "nvidia")
"""How containers get GPUs: a device reservation, the Container Device Interface, or the older `nvidia` runtime."""

NCCL_LEVEL = "WARN"
NCCL_LEVELS = ("VERSION", NCCL_LEVEL, "INFO", "TRACE")
MAX_GPUS = 1024
NO_DEVICE = "-1"
"""What CUDA takes for no device at all."""


@dataclass(frozen=True)
class GpuRequest:
    """The requested GPUs, checked as far as possible without looking at the machine."""

    text: str
    """The options, as messages repeat them."""
    ids: tuple[str, ...] = ()
    """Those to choose from; empty: all of this machine's."""
    count: int = 0
    """How many in all; 0: as many as there are, or as `per_task` makes."""
    per_task: int = 0
    partial: bool = False
    """Whether some of `ids` may be left over, as when a run continues with fewer tasks."""


@dataclass(frozen=True)
class Placement:
    """The GPUs of a run's tasks, and how containers get them."""

    ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each task's; a task that is not in it gets none."""
    requested: str = ""
    """`--gpus` as typed, for when the run is resumed."""
    device_request: str = DEVICE_REQUEST
    nccl_debug: str = NCCL_LEVEL
    notes: tuple[str, ...] = ()
    memory_bytes: int = 0
    """Memory of the smallest GPU; 0: not known."""

    @property
    def accelerator(self) -> str:
        """Which training image the tasks need: all the same, so that all compute with one TensorFlow."""
        return "gpu" if self.ids else "cpu"

    def of(self, task: str) -> tuple[str, ...]:
        """Return the ids of a task's GPUs."""
        return self.ids.get(task, ())

    def shown(self, task: str) -> list[int | str]:
        """Return the ids for JSON: indices as numbers."""
        return [int(gpu) if gpu.isdigit() else gpu for gpu in self.of(task)]

    def environment(self, task: str) -> dict[str, str]:
        """Return the variables that give a task its GPUs, wherever it runs."""
        if not (ids := self.of(task)):
            return {}
        return {
            "GPUS_GIVEN": str(len(ids)),  # the training program checks that TensorFlow sees as many
            "NCCL_DEBUG": self.nccl_debug,
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # also for scripts, and for workers that only serve
        }

    def lines(self) -> list[str]:
        """Return which task gets which GPUs, as lines of text; empty if none does."""
        each = "; ".join(f"{task} {','.join(ids)}" for task, ids in self.ids.items())
        return [f"GPUs: {each}"] if each else []

    def record(self) -> dict[str, Any]:
        """Return the entry for `compose.json`, by which other runs avoid these GPUs, see `ids_in`."""
        return {GPUS: {task: list(ids) for task, ids in self.ids.items()}} if self.ids else {}

    def to_json(self) -> dict[str, str]:
        """Return the record that a resumed run inherits; empty if it has no GPUs."""
        found = {"gpus": self.requested, "runtime": self.device_request, "nccl_debug": self.nccl_debug}
        return found if self.ids else {}


def ids_in(compose: Mapping[str, Any]) -> list[str]:
    """Return the ids of all GPUs that a run's `compose.json` hands out."""
    return [gpu for ids in compose.get(GPUS, {}).values() for gpu in ids]


def parse(gpus: str, per_task: str) -> GpuRequest | None:
    """Parse `--gpus` and `--gpus-per-task`; None if they request none."""
    words = [f"--gpus {gpus}"] * bool(gpus) + [f"--gpus-per-task {per_task}"] * bool(per_task)
    each = parse_count("gpus-per-task", per_task, 1, MAX_DEVICES) if per_task else 0
    request = GpuRequest(" ".join(words), per_task=each)
    if gpus in ("", "none"):
        if gpus and per_task:
            raise UsageError(f"{request.text}: none is none for each task; leave one of them out")
        return request if per_task else None
    if gpus == "all":
        return request
    if re.fullmatch(r"[1-9][0-9]{0,3}", gpus) and int(gpus) <= MAX_GPUS:
        return replace(request, count=int(gpus))
    ids = gpus.removesuffix(",").split(",")
    if not all(re.fullmatch(r"0|[1-9][0-9]{0,3}|MIG-[0-9A-Za-z/-]+", part) for part in ids) or gpus == "0":
        raise UsageError(
            f"--gpus {gpus!r}: expected none, all, how many such as 4, or ids such as 0,1; one id ends with a comma, "
            "such as 0,"
        )
    if twice := [part for part, times in Counter(ids).items() if times > 1]:
        raise UsageError(f"--gpus {gpus}: GPU {twice[0]} is named more than once; name each GPU once")
    return replace(request, ids=tuple(ids))


def requested(gpus: str, per_task: str, recorded: Mapping[str, Any], previous_devices: int) -> GpuRequest | None:
    """Return the present request, or else that of the resumed run."""
    if gpus or per_task:
        return parse(gpus, per_task)
    if not recorded:
        return None
    # As many GPUs for each task as before, from the same ones if the run named them.
    previous = parse(recorded["gpus"], "")
    text = f"--gpus {recorded['gpus']}" if recorded["gpus"] else f"--gpus-per-task {previous_devices}"
    ids = previous.ids if previous else ()
    return GpuRequest(f"{text} of the run", ids, per_task=previous_devices, partial=True)


def device_handling(runtime: str, nccl_debug: str) -> tuple[str, str]:
    """Return `--gpu-runtime` and `--nccl-debug`, or their defaults."""
    runtime, nccl_debug = runtime or DEVICE_REQUEST, (nccl_debug or NCCL_LEVEL).upper()
    for name, value, known in (("gpu-runtime", runtime, DEVICE_REQUESTS), ("nccl-debug", nccl_debug, NCCL_LEVELS)):
        if value not in known:
            raise UsageError(f"--{name} {value!r}: expected one of {', '.join(known)}{nearest(value, known)}")
    return runtime, nccl_debug


def place(
    request: GpuRequest, machine: Machine, cluster: ClusterSpec, busy: Mapping[str, str] | None = None
) -> Placement:
    """Return which task gets which GPUs, none of which other runs train on (`busy`, with their names)."""
    tasks = [task.name for task in (*cluster.of(Role.CHIEF), *cluster.of(Role.WORKER))]
    pool = _named(request, machine) if request.ids else _free(request, machine, len(tasks), busy or {})
    _refuse_busy(request, pool, busy or {})
    count = _count(request, len(pool), len(tasks))
    if any(gpu.id.startswith("MIG-") for gpu in pool):
        _check_instances(request, count // len(tasks), cluster)
    groups = _share_out([gpu.id for gpu in pool], len(tasks), count // len(tasks), machine)
    notes: tuple[str, ...] = ()
    used = [gpu for gpu in pool if any(gpu.id in group for group in groups)]
    if len({gpu.model for gpu in used}) > 1:
        notes = (f"the GPUs are of several models ({_models(used)}): every synchronous step waits for the slowest",)
    memory_bytes = min(gpu.memory_mib for gpu in pool) * 2**20
    return Placement(dict(zip(tasks, groups, strict=True)), notes=notes, memory_bytes=memory_bytes)


def _named(request: GpuRequest, machine: Machine) -> list[Gpu]:
    known = {gpu.id: gpu for gpu in (*machine.gpus, *machine.instances)}
    if unknown := [name for name in request.ids if name not in known]:
        raise UsageError(
            f"{request.text}: there is no GPU {unknown[0]} here; this machine has {', '.join(known)}: name some of "
            "these"
        )
    named = [gpu for gpu in known.values() if gpu.id in request.ids]
    _refuse_mig(request, [gpu for gpu in named if gpu.mig])
    return named


def _free(request: GpuRequest, machine: Machine, num_tasks: int, busy: Mapping[str, str]) -> list[Gpu]:
    """Return GPUs of one model to choose from, where none were named."""
    takes_all = not request.count and not request.per_task
    whole = [gpu for gpu in machine.gpus if not gpu.mig]
    usable = [gpu for gpu in whole if gpu.id not in busy]
    if takes_all or not whole:
        _refuse_mig(request, [gpu for gpu in machine.gpus if gpu.mig])
    if takes_all or not usable:
        _refuse_busy(request, whole, busy)
    models: dict[str, list[Gpu]] = {}
    for gpu in usable:
        models.setdefault(gpu.model, []).append(gpu)
    if takes_all and len(models) > 1:
        one = ",".join(gpu.id for gpu in max(models.values(), key=len))
        raise UsageError(
            f"{request.text}: this machine's GPUs are of {len(models)} models ({_models(usable)}), and every step "
            f"would wait for the slowest; use those of one, such as --gpus {one}, or name all of them to have it so"
        )
    pool = max(models.values(), key=len)  # the first of two equally many: that of the lowest id
    count = request.per_task * num_tasks or request.count
    if count > len(usable):
        others = {"in MIG mode": len(machine.gpus) - len(whole), "in use by other runs": len(whole) - len(usable)}
        besides = " and ".join(f"{number} {what}" for what, number in others.items() if number)
        raise UsageError(
            f"{request.text}: {counted(count, 'GPU')} for {counted(num_tasks, 'task')}, and this machine has "
            f"{len(usable)}{f' besides {besides}' if besides else ''}; request fewer, or use fewer workers"
        )
    if len(pool) < count:
        raise UsageError(
            f"{request.text}: {count} GPUs are needed, and at most {len(pool)} are of one model ({_models(usable)}); "
            "request fewer, or name them to mix models"
        )
    return pool


def _count(request: GpuRequest, available: int, num_tasks: int) -> int:
    tasks = "the chief alone" if num_tasks == 1 else f"{num_tasks} tasks (the chief and the workers)"
    exact = request.count or (len(request.ids) if request.ids and not request.partial else 0)
    count = request.per_task * num_tasks or exact or available
    if exact and exact != count:
        raise UsageError(
            f"{request.text}: {tasks} with {request.per_task} each make {count}, not {exact}; leave one of the two out"
        )
    if count > available:
        raise UsageError(
            f"{request.text}: {tasks} would need {count}, and there are {available} to choose from; request fewer, or "
            "use fewer workers"
        )
    if count % num_tasks:
        fewer, more = count // num_tasks * num_tasks, (count // num_tasks + 1) * num_tasks
        fits = " or ".join(str(number) for number in (fewer, more) if number and (number <= available or request.ids))
        use = ("name " if request.ids else "use --gpus ") + fits if fits else "use fewer workers"
        raise UsageError(
            f"{request.text}: {tasks} cannot share {counted(count, 'GPU')} evenly, and would wait for each other; {use}"
        )
    return count


def _refuse_mig(request: GpuRequest, gpus: Sequence[Gpu]) -> None:
    if gpus:
        one = gpus[0].id
        raise UsageError(
            f"{request.text}: GPU {one} is in MIG mode, so only its instances can be used; name one by the UUID "
            f"that `nvidia-smi -L` shows, name other GPUs, or end the mode with `nvidia-smi -i {one} -mig 0`"
        )


def _refuse_busy(request: GpuRequest, gpus: Sequence[Gpu], busy: Mapping[str, str]) -> None:
    if taken := [gpu.id for gpu in gpus if gpu.id in busy]:
        run = busy[taken[0]]
        raise UsageError(
            f"{request.text}: run {run!r} trains on GPU {taken[0]}; use others, or `invoke stop {run}` before this"
        )


def _check_instances(request: GpuRequest, per_task: int, cluster: ClusterSpec) -> None:
    """Check what MIG instances can do: a process sees one of them at most, and NCCL does not connect them."""
    if per_task > 1 or cluster.kind.collective:
        raise UsageError(
            f"{request.text}: MIG instances cannot train together (a process sees one, and NCCL connects none); use "
            "one with --workers 0, whole GPUs, or parameter servers"
        )


def _share_out(ids: Sequence[str], num_tasks: int, per_task: int, machine: Machine) -> list[tuple[str, ...]]:
    """Return a group of GPUs for each task: in the order of their ids, but GPUs that NVLink connects together."""
    left, groups = list(ids), []
    for _ in range(num_tasks):
        group = [left.pop(0)]
        while len(group) < per_task:
            linked = (gpu for gpu in left if all(machine.linked(gpu, member) for member in group))
            group.append(next(linked, left[0]))
            left.remove(group[-1])
        groups.append(tuple(sorted(group, key=ids.index)))
    return groups


def _models(gpus: Sequence[Gpu]) -> str:
    found: dict[str, list[str]] = {}
    for gpu in gpus:
        found.setdefault(gpu.model, []).append(gpu.id)
    return "; ".join(f"{model}: {','.join(ids)}" for model, ids in found.items())
