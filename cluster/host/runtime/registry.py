"""The registry of runtimes, and the choice of a run's runtime."""

from cluster.contract.run.folder import RunFolder
from cluster.contract.strategies import Strategy
from cluster.host.runtime.base import Runtime, recorded_runtime
from cluster.host.runtime.compose_runtime import Compose
from cluster.host.runtime.local_runtime import LocalProcesses
from cluster.host.schedulers.slurm_runtime import Slurm
from cluster.host.schedulers.swarm_runtime import Swarm
from cluster.system.errors import PrerequisiteError, UsageError, nearest

AUTO = "auto"
LOCAL = LocalProcesses()
RUNTIMES: dict[str, Runtime] = {each.name: each for each in (Compose(), LOCAL, Slurm(), Swarm())}
"""The runtimes by name, in the order of preference of `auto`."""


def get_runtime(name: str) -> Runtime:
    """Return the runtime called `name`; raise UsageError if there is none."""
    if name not in RUNTIMES:
        raise UsageError(f"--runtime {name!r} is not a runtime{nearest(name, [AUTO, *RUNTIMES])}")
    return RUNTIMES[name]


def find_runtime(run: RunFolder) -> Runtime:
    """Return the runtime on which a run was started; the local one if the run's records are damaged."""
    return RUNTIMES.get(recorded_runtime(run), LOCAL)


def choose_runtime(requested: str, strategy: Strategy | None = None) -> tuple[Runtime, str]:
    """Return the runtime for `--runtime`, with an explanation of the choice; the strategy may need hardware."""
    hardware = strategy.hardware.upper() if strategy else ""
    why = ""
    if requested != AUTO:
        runtime = get_runtime(requested)
        if strategy and hardware and not runtime.reaches_hardware:
            others = " or ".join(f"--runtime {each.name}" for each in RUNTIMES.values() if each.reaches_hardware)
            option = f"--runtime {runtime.name} with --strategy {strategy.name}"
            raise UsageError(f"{option}: {runtime.tasks} get no {hardware}; use {others}")
        if not (state := runtime.probe()).ready:
            advice = f"{state.fix}, or use --runtime {LOCAL.name}"
            raise PrerequisiteError(f"--runtime {runtime.name}: {state.detail}; {advice}")
        return runtime, f"{runtime.tasks}: {state.detail}" if state.detail else f"{runtime.tasks}, as requested"
    for runtime in (each for each in RUNTIMES.values() if each.automatic):
        if hardware and not runtime.reaches_hardware:
            why = f"{runtime.tasks} get no {hardware}"
            continue
        if (state := runtime.probe()).remote:
            why = f"{state.remote} may not have this machine's files; if it has, use --runtime {runtime.name}"
        elif state.ready:
            return runtime, f"{runtime.tasks}: {state.detail or why}"
        else:
            why = state.detail
    raise PrerequisiteError(f"--runtime {AUTO}: {why}")
