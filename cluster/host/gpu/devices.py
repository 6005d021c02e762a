"""The GPUs of this machine and their NVLinks, according to `nvidia-smi`, and the checks that tasks can use them."""

import re
import shutil
from dataclasses import dataclass
from importlib import metadata

from cluster.host.image import engine
from cluster.system import processes
from cluster.system.errors import ClusterError, PrerequisiteError

QUERY = ("--query-gpu=index,name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
ANSWER_TIMEOUT_S = 30.0
"""Timeout of `nvidia-smi`: the driver takes seconds to wake unused GPUs."""

_HOOK = "nvidia-container-runtime-hook"
CONFIGURE = "`nvidia-ctk runtime configure --runtime=docker` and restart the engine"

_NVLINK = re.compile(r"NV\d+")
_INDEX = re.compile(r"GPU(\d+)")
_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
_INSTANCE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")


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
    """The GPUs in the order of their indices."""
    instances: tuple[Gpu, ...] = ()
    """The MIG instances, if they were requested."""
    nvlinks: frozenset[tuple[str, str]] = frozenset()
    """The pairs of GPUs that NVLink connects, in both orders; empty if `nvidia-smi topo` failed."""


def ask_nvidia_smi(*words: str) -> tuple[int, str]:
    """Run `nvidia-smi`; return its exit code and output, or the reason for a failure."""
    code, printed, complained = processes.run(["nvidia-smi", *words], ANSWER_TIMEOUT_S)
    return code, printed if code == 0 else printed.strip() or complained.strip()


def read_machine(what: str, *, with_instances: bool = False) -> Machine:
    """Return this machine's GPUs, which the option `what` needs, and its MIG instances if requested."""
    code, text = ask_nvidia_smi(*QUERY)
    if code or not text.strip():
        why = (text.strip() or "nvidia-smi lists no GPU").splitlines()[-1]
        raise PrerequisiteError(
            f"{what}: no GPU was found on this machine ({why}); install NVIDIA's driver, or use --gpus none"
        )
    gpus = parse_inventory(text)
    nvlinks = parse_nvlinks(ask_nvidia_smi("topo", "-m")[1])  # empty if it failed
    code, text = ask_nvidia_smi("-L") if with_instances else (1, "")
    matches = [_INSTANCE.match(line) for line in text.splitlines() if code == 0]
    return Machine(gpus, tuple(Gpu(match[2], f"MIG {match[1]}", 0) for match in matches if match), nvlinks)


def parse_inventory(text: str) -> tuple[Gpu, ...]:
    """Parse the GPUs in the output of `nvidia-smi --query-gpu`."""
    gpus = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[0].isdigit():
            raise ClusterError(
                f"nvidia-smi printed {line.strip()[:100]!r}: expected index, name, memory and MIG mode; run "
                "`nvidia-smi` to see what is wrong with the driver"
            )
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
        raise PrerequisiteError(
            "--gpus with containers: the engine has no NVIDIA runtime, so containers get no GPU; install NVIDIA's "
            f"container toolkit, then {CONFIGURE}"
        )


def check_environment() -> None:
    """Check that processes of this environment can use GPUs."""
    if not any(metadata.distributions(name="tensorflow")):
        raise PrerequisiteError(
            "--gpus with local processes: this environment has tensorflow-cpu, which uses no GPU; use --runtime "
            "docker, or an environment with CUDA: set ACCELERATOR=gpu as docs/guides/gpus.md says"
        )
