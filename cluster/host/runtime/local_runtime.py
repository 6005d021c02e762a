"""The runtime of local processes, which a supervisor starts and restarts, see `supervisor.py`."""

import resource
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from cluster.contract import settings, tf_config, user_code
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import TRAINER_IMPORTS
from cluster.contract.spec import ClusterSpec
from cluster.host import nvidia
from cluster.host.image.engine import Availability
from cluster.host.runtime import namespaces, resources, supervisor, warm
from cluster.host.runtime.base import SLOWED_SHARE, FaultInjector, Finding, Runtime, Shell, Workload
from cluster.host.runtime.payload import with_variables
from cluster.host.runtime.resources import HOST, PRIVATE, Network
from cluster.system import processes
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.ports import free_ports

SLICE_S = 0.5
INSTEAD = "containers, or a firewall, close them"


class ProcessFaults(FaultInjector):
    """Injects faults into local processes, by signals and limits."""

    storm = FaultInjector.storm | {"lose"}
    refusals: ClassVar = {"partition": "local tasks share one network; use a run of --runtime docker"}

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run)
        self._lost: list[Path] = []
        self._undone = threading.Event()
        self._slowing: threading.Thread | None = None

    def signal(self, task: str, number: int, *whose: str) -> None:
        identities = self.processes(task)
        for which in whose:
            processes.kill(identities[which], number)

    def lose(self, task: str) -> None:
        """Kill the whole task, and keep the supervisor from restarting it."""
        away = self._run.away(task)
        away.parent.mkdir(exist_ok=True)
        away.touch()
        self._lost.append(away)
        self.signal(task, signal.SIGKILL, "agent", "program")

    def slow(self, task: str) -> None:
        """Repeatedly stop and continue the program, in a thread."""
        program = self.processes(task)["program"]

        def stop_and_go() -> None:
            while not self._undone.wait(SLICE_S * SLOWED_SHARE):
                processes.kill(program, signal.SIGSTOP)
                self._undone.wait(SLICE_S * (1 - SLOWED_SHARE))
                processes.kill(program, signal.SIGCONT)

        self._undone.clear()
        self._slowing = threading.Thread(target=stop_and_go, daemon=True)
        self._slowing.start()

    def oom(self, task: str) -> None:
        """Limit the program's memory to its current size, so that its next allocation fails."""
        recorded = self.processes(task)["program"]
        if not processes.alive(recorded):
            return
        size = int(Path(f"/proc/{recorded['pid']}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(recorded["pid"], resource.RLIMIT_AS, (size, size))

    def undo(self, task: str) -> None:
        self._undone.set()
        if self._slowing:
            self._slowing.join()
            self._slowing = None
        while self._lost:
            self._lost.pop().unlink(missing_ok=True)
        super().undo(task)


class LocalProcesses(Runtime):
    """The runtime of local processes."""

    name = "local"
    tasks = "local processes"
    automatic = True
    reaches_hardware = True
    injector = ProcessFaults

    def __init__(self) -> None:
        self._early: warm.EarlySupervisor | None = None

    def probe(self) -> Availability:
        return Availability(True)

    def examine(self) -> list[Finding]:
        room = Finding("memory", "ok", "enough for a chief and 2 workers")
        try:
            resources.check_free_memory(3)
        except ClusterError as error:
            room = Finding("memory", "failed", str(error), "free memory, or start fewer tasks: --workers 0")
        network = Finding("task network", "ok", "local tasks get a private one")
        if refused := namespaces.refusal():
            detail = f"local tasks share this machine's network, where everybody reaches them: {refused.why}"
            network = Finding(network.check, "warning", detail, f"{refused.fix}; {INSTEAD}")
        return [room, network]

    def network(self, requested: str, previous: str, *, way_out: str, serves: bool) -> Network:
        resources.check_network(requested)
        typed = requested or previous
        if typed == HOST:
            why = f"as requested (--network {HOST})"
        elif way_out and not typed:
            why = f"{way_out}; --network {PRIVATE} prevents that"
        elif (refused := namespaces.refusal()) is None:
            return Network(PRIVATE, typed)
        elif typed:
            why = f"tasks can have no private network here: {refused.why}"
            raise PrerequisiteError(f"--network {PRIVATE}: {why}; {refused.fix}, or leave it out")
        else:
            why = f"they can have no private network: {refused.why}; {refused.fix}, or {INSTEAD}"
        warning = f"{resources.EXPOSED}: the tasks are in this machine's network, {why}"
        return Network(HOST, typed, warning if serves else "")

    def ports(self, num_tasks: int) -> tuple[int, ...]:
        return free_ports(num_tasks)

    def render(self, work: Workload) -> dict[str, Any]:
        payload = work.payload
        more = payload.environment(work.cluster, payload.local_path())
        command, network = payload.command(), work.network.name
        return processes_of(work.cluster, work.run.path, work.data_dir, command, more, work.gpus, network)

    def preflight(self, work: Workload, ending: int = 0) -> None:
        resources.check_free_memory(len(work.cluster.tasks), ending)
        if work.gpus.ids:
            nvidia.check_environment()

    def commands(self, work: Workload) -> list[str]:
        tasks = self.render(work)["tasks"].values()
        return [with_variables(task["environment"], f"{shlex.join(task['command'])} &") for task in tasks]

    def anticipate(self, work: Workload, compose: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        if self._early:
            self._early.end()
            self._early = None
        if compose.get("preload"):
            self._early = warm.EarlySupervisor(work.run, compose, config, work.cluster.strategy, work.keep_s)

    @property
    def program_starter(self) -> user_code.Start | None:
        return self._early.call if self._early else None

    def start(self, work: Workload, sh: Shell) -> None:  # noqa: ARG002
        early, self._early = self._early, None
        supervisor.start_supervisor(work.run, *([early] if early and early.serves() else []))

    def alive(self, run: RunFolder) -> bool:
        return supervisor.is_running(run)

    def remove(self, run: RunFolder, sh: Shell, grace_s: int) -> None:  # noqa: ARG002
        supervisor.kill_run(run)

    def find_leftovers(self, runs_dir: Path, names: Collection[str]) -> set[str]:
        table = processes.ProcessTable()
        return {name for name in names if supervisor.processes_left(RunFolder(runs_dir / name), table)}


def processes_of(
    spec: ClusterSpec,
    run_dir: Path,
    data_dir: Path,
    command: list[str],
    more: Mapping[str, str | None] | None = None,
    gpus: nvidia.Placement | None = None,
    network: str = HOST,
) -> dict[str, Any]:
    """Return the local form of `compose.json`: each task's command and additional environment.

    `command` are the agent's arguments, empty for the built-in trainer. Every task also gets the variables `more`, of
    which None means the caller's value. Without `gpus` no task sees any GPU.
    """
    more, gpus = more or {}, gpus or nvidia.Placement()
    values = {name: value for name, value in more.items() if value is not None}
    tasks = {}
    for task in spec.tasks:
        environment = {"RUN_DIR": str(run_dir), "DATA_DIR": str(data_dir), "TASK": task.name, **values}
        if ids := gpus.of(task.name):
            order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the order of nvidia-smi's indices
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(ids)} | order | gpus.environment(task.name, more)
            if network == PRIVATE:
                environment["NCCL_SOCKET_IFNAME"] = "lo"  # the caller's may not exist in there
        else:
            environment["CUDA_VISIBLE_DEVICES"] = nvidia.NO_DEVICE  # whatever the caller sees
        if text := tf_config.dumps(spec, task):
            environment["TF_CONFIG"] = text
        tasks[task.name] = {"command": [sys.executable, "-m", "cluster.agent", *command], "environment": environment}
    names = [name for name, value in more.items() if value is None]
    composed: dict[str, Any] = {"runtime": "local", "network": network, "inherits": names, "tasks": tasks}
    # An accelerator's library cannot be used in a fork of the process that loaded it.
    accelerated = bool(spec.kind.hardware) or any(gpus.of(task.name) for task in spec.tasks)
    shared = settings.is_on("SHARED_IMPORT")
    return composed | {"preload": TRAINER_IMPORTS} if shared and not command and not accelerated else composed
