"""From what was asked on the command line to a plan: everything is checked here, and nothing is changed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import settings, spec, tf_config
from cluster.agent.watchdog import HANG_TIMEOUT_S
from cluster.errors import UsageError
from cluster.gpu import devices, placement
from cluster.gpu.placement import Placement
from cluster.image import engine, images
from cluster.launch import configuration, packages, resuming
from cluster.launch.folders import check_folder, data_dir, find_run, free_folder, runs_dir
from cluster.launch.options import Needs
from cluster.launch.payload import Payload, check_path, check_readable, check_script
from cluster.launch.request import Request, check_hardware, check_needs, check_together
from cluster.launch.request import topology as topology_of
from cluster.launch.teardown import in_progress
from cluster.recovery.attempts import MAX_RESTARTS
from cluster.run import provenance
from cluster.run.folder import RunFolder
from cluster.runtime import compose, inherited, local, network, tensorboard
from cluster.runtime import memory as limits
from cluster.runtime.memory import Memory
from cluster.runtime.network import Network
from cluster.strategies import Strategy


@dataclass(frozen=True)
class Plan:
    """A run that was checked and can be started."""

    run: RunFolder
    cluster: spec.ClusterSpec
    config: dict[str, Any]
    payload: Payload
    data: str
    """In words what is prepared of its data; empty where something must be."""
    runtime: str
    why_runtime: str
    compose: dict[str, Any]
    tensorboard_port: int
    hang_timeout_s: int
    max_restarts: int
    resumes: bool
    replaces: bool
    gpus: Placement
    memory: Memory
    trusts: bool
    """Whether its run may go on though this user did not start it."""
    network: Network
    about_resuming: tuple[str, ...] = ()
    """What the caller should know of a run that goes on."""

    @property
    def contained(self) -> bool:
        """Whether the tasks are containers."""
        return self.runtime == "docker"

    @property
    def notes(self) -> list[str]:
        """What the caller should know of it besides."""
        others = [*self._keras_notes, *self.about_resuming, *filter(None, [self.network.warning])]
        return [*self.gpus.lines(), *self.gpus.notes, *others]

    @property
    def _keras_notes(self) -> list[str]:
        if self.config.get("loop") == "fit":
            if self.cluster.kind.legacy_fit:
                return ["Model.fit is that of tf_keras, because Keras 3's own fails on more than one task"]
            return ["Model.fit is that of Keras 3"]
        if not self.payload.needs_legacy_keras(self.cluster):
            return []
        return [
            "tf.keras is Keras 2 (tf_keras) for the script, because Keras 3's own fit fails on more than one task; "
            "TF_USE_LEGACY_KERAS=0 keeps Keras 3"
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plan for `invoke plan --json`."""
        batch = self.config.get("global_batch")
        shards = self.config.get("bitwise_elastic") or self.cluster.batch_divisor
        most = -(-shards // self.cluster.batch_divisor)  # of one replica: they need not share them evenly
        return {
            "run": self.run.name,
            "runtime": self.runtime,
            "network": self.network.name,
            "strategy": self.cluster.strategy_class,
            "replicas": self.cluster.replicas,
            "global_batch": batch,
            "replica_batch": batch and batch // shards * most,
            "training": self._training(),
            "tensorboard": tensorboard.address(self.tensorboard_port) if self.tensorboard_port else None,
            "tasks": [
                {
                    "task": task.name,
                    "address": task.address,
                    "gpus": self.gpus.shown(task.name),
                    "tf_config": tf_config.render(self.cluster, task),
                }
                for task in self.cluster.tasks
            ],
            "notes": [*self.gpus.notes, *self.about_resuming, *filter(None, [self.network.warning])],
            "config": self.config,
            "compose": self.compose,
        }

    def _training(self) -> dict[str, Any] | None:
        """Return the numerics that follow from the configuration and the cluster; None for a script."""
        settings, batch = self.config.get("optimizer"), self.config.get("global_batch")
        if settings is None or batch is None:
            return None
        rule, base_batch = settings.get("scaling", "none"), settings.get("base_batch", batch)
        rate = settings["learning_rate"]
        return {
            "precision": spec.precision_of(self.cluster.strategy, self.config.get("precision", "fp32")),
            "optimizer": settings["name"],
            "learning_rate": spec.scale_rate(rate, rule, batch, base_batch),
            "scaling": rule,
            "base_learning_rate": rate,
            "base_batch": None if rule == "none" else base_batch,
            "warmup_steps": 0 if self.config.get("callbacks") else settings["warmup_steps"],
            "clip_norm": settings.get("clip_norm", 0.0),
        }


def plan(request: Request, *, stops_first: bool = False, installs: bool = True) -> Plan:
    """Check a request and return what would be started. Changes nothing.

    Args:
        request: what was asked for.
        stops_first: whether the run to resume may be in progress, because it is stopped before the plan is started.
        installs: whether the packages of `--requirements` are installed, or only resolved: the plan is not started.

    Raises:
        UsageError: something asked for cannot be done.
        PrerequisiteError: something that this machine must have is missing.
    """
    settings.check()
    check_together(request, scripted=None if request.resume or request.again else bool(request.script))
    base = find_run(request.resume or request.again) if request.resume or request.again else None
    if base and not request.trust:
        provenance.check(base)  # before anything is believed that it says
    if base:
        check_together(request, scripted=bool(base.script))
    topology = topology_of(request, base.load_cluster() if base else None)
    topology["separate_chief"] = _separate_chief(request, base)
    check_hardware(topology["strategy"])
    asked = spec.build(**topology)
    port = spec.parse_count("tensorboard-port", request.tensorboard_port or tensorboard.PORT, 0, 65535)
    patience_s = spec.parse_count("hang-timeout", request.hang_timeout or int(HANG_TIMEOUT_S), 1, 86_400)
    restarts = spec.parse_count("max-restarts", request.max_restarts or MAX_RESTARTS, 0, 1000)
    run = _run_folder(request, stops_first=stops_first)
    given = _place(request, run, base, asked)
    if given.ids:
        topology["devices"] = len(given.of("chief"))
        asked = spec.build(**topology)
    runtime, why = _choose_runtime(request.runtime or "auto", asked.kind)
    config, payload, data = _resolve(request, base, runtime, installs=installs)
    about_resuming = []
    if payload.script is None:
        check_sharing(config, asked)
        if request.resume:
            about_resuming = resuming.check(run, request.preset, config, asked)
    contained = runtime != "local"
    memory = _memory(request, base, len(asked.tasks), contained=contained)
    cluster = asked if contained else spec.build(**topology, ports=local.free_ports(len(asked.tasks)))
    inside = _network(request, base, cluster, payload, contained=contained)
    if contained:
        how = _containers(run, cluster, payload, given, memory)
    else:
        how = _processes(run, cluster, payload, given, inside)
    return Plan(
        run=run,
        cluster=cluster,
        config=config,
        payload=payload,
        data=data,
        runtime=runtime,
        why_runtime=why,
        compose=how | given.record(),
        tensorboard_port=port,
        hang_timeout_s=patience_s,
        max_restarts=restarts,
        resumes=bool(request.resume),
        replaces=request.fresh and run.path.exists(),
        gpus=given,
        memory=memory,
        trusts=request.trust,
        network=inside,
        about_resuming=tuple(about_resuming),
    )


def _separate_chief(request: Request, base: RunFolder | None) -> bool:
    """Return whether TF_CONFIG has a chief beside the workers: always, but for a script that did not ask for one."""
    recorded = base.script if base else None
    if not request.script and not recorded:
        return True
    return request.separate_chief or bool((recorded or {}).get("separate_chief"))


def _memory(request: Request, base: RunFolder | None, num_tasks: int, *, contained: bool) -> Memory:
    """Return what each task may use of the machine's memory, as asked for now or when the run was started.

    Raises:
        UsageError: it was asked for where there can be none, or is no amount.
    """
    limits.parse(request.memory)  # a typo is told first
    check_needs(request, {Needs.CONTAINERS: contained})
    had = base.started.get("memory", "") if base else ""
    wanted = request.memory or str(had)
    return limits.of_containers(wanted, num_tasks, engine.memory_bytes()) if contained else Memory(wanted)


def _place(request: Request, run: RunFolder, base: RunFolder | None, cluster: spec.ClusterSpec) -> Placement:
    """Return which task gets which of this machine's GPUs.

    Raises:
        UsageError: what was asked for cannot be had.
        PrerequisiteError: this machine has no GPU.
    """
    had = base.started.get("gpus", {}) if base else {}
    wanted = placement.wish(request.gpus, request.gpus_per_task, had, cluster.devices)
    check_needs(request, {Needs.GPUS: wanted is not None})
    if wanted is None:
        return Placement()
    if cluster.kind.hardware:
        hardware = cluster.kind.hardware.upper()
        raise UsageError(
            f"{wanted.told} with --strategy {cluster.strategy}: one run trains on GPUs or on a {hardware}; leave "
            "one of them out"
        )
    handover, level = placement.handling(
        request.gpu_runtime or had.get("runtime", ""), request.nccl_debug or had.get("nccl_debug", "")
    )
    machine = devices.machine(wanted.told, with_instances=any(name.startswith("MIG-") for name in wanted.ids))
    placed = placement.place(wanted, machine, cluster, busy(run))
    each = len(placed.of("chief"))
    if request.devices and cluster.devices != each:
        raise UsageError(
            f"--devices {request.devices} with {wanted.told}: a task with {each} GPUs has as many replicas; leave "
            "--devices out, or ask for as many GPUs"
        )
    typed = request.gpus or request.gpus_per_task
    return replace(placed, asked=request.gpus if typed else had["gpus"], handover=handover, nccl_debug=level)


def busy(run: RunFolder | None = None) -> dict[str, str]:
    """Return the GPUs that runs of this folder other than this one train on, each with the name of its run."""
    own = run.path if run else None
    others = (RunFolder(path.parent) for path in runs_dir().glob("*/compose.json") if path.parent != own)
    used = {other: placement.ids_in(other.composed) for other in others}
    return {gpu: other.name for other, ids in used.items() if ids and in_progress(other) for gpu in ids}


def check_sharing(config: dict[str, Any], cluster: spec.ClusterSpec) -> None:
    """Check that the cluster's replicas can share the configuration's global batch, and compute in its precision.

    Raises:
        UsageError: they cannot.
    """
    spec.check_precision(cluster, config.get("precision", "fp32"))
    if shards := config.get("bitwise_elastic", 0):  # the training program has checked that they cut the batch evenly
        spec.check_shards(cluster, shards)
    else:
        spec.check_global_batch(config["global_batch"], cluster.batch_divisor)


def _network(
    request: Request, base: RunFolder | None, cluster: spec.ClusterSpec, payload: Payload, *, contained: bool
) -> Network:
    """Return the network that the tasks get.

    Raises:
        UsageError: what was asked for is no network, or not theirs to choose.
        PrerequisiteError: this machine gives no network of their own to tasks that must have one.
    """
    had = base.started.get("network", "") if base else ""
    way_out = "where a script can fetch its data" if payload.script else ""
    if cluster.kind.hardware:
        way_out = f"where they reach their {cluster.kind.hardware.upper()}"
    return network.choose(request.network, had, contained=contained, way_out=way_out, serves=bool(cluster.members))


def _processes(
    run: RunFolder, cluster: spec.ClusterSpec, payload: Payload, given: Placement, inside: Network
) -> dict[str, Any]:
    """Return `compose.json` for local processes."""
    more, command = payload.environment(cluster, contained=False), payload.command(contained=False)
    return local.processes_of(cluster, run.path, data_dir(), command, more, given, inside.name)


def _containers(
    run: RunFolder, cluster: spec.ClusterSpec, payload: Payload, given: Placement, memory: Memory
) -> dict[str, Any]:
    """Return `compose.json` for containers, which must be able to read the payload, and not our key."""
    check_readable(payload, compose.task_user())
    provenance.check_hidden([run.path.parent, data_dir(), *(folder for folder, _ in payload.mounts())])
    containers = compose.Containers(
        run.path,
        data_dir(),
        images.train_image(given.accelerator),
        compose.task_user(),
        memory.task_bytes,
        payload.mounts(),
        payload.environment(cluster, contained=True),
        way_out=payload.script is not None,
        gpus=given,
    )
    return {"x-runtime": "docker", **compose.overlay(cluster, containers, payload.command(contained=True))}


def _run_folder(request: Request, *, stops_first: bool) -> RunFolder:
    """Return the folder that the run shall have, checked against what is there."""
    if request.resume:
        run = find_run(request.resume)
    elif request.name:
        run = RunFolder(runs_dir() / spec.check_run_name(request.name))
    else:
        run = free_folder(spec.check_run_name(request.run_name()))
    if not stops_first:
        check_folder(run, resumes=bool(request.resume), replaces=request.fresh)
    return run


def _choose_runtime(requested: str, strategy: Strategy) -> tuple[str, str]:
    """Return `docker` or `local`, and in words why."""
    if strategy.hardware and requested == "docker":
        raise UsageError(
            f"--runtime docker with --strategy {strategy.name}: containers get no {strategy.hardware.upper()}; "
            "use --runtime local"
        )
    if strategy.hardware and requested == "auto":
        return "local", f"a local process: containers get no {strategy.hardware.upper()}"
    return engine.choose_runtime(requested)


def _resolve(
    request: Request, base: RunFolder | None, runtime: str, *, installs: bool
) -> tuple[dict[str, Any], Payload, str]:
    """Return the run's `config.json`, what its tasks bring along, and in words what data is there for them already.

    Args:
        request: what was asked for.
        base: the run to go on with, or to repeat.
        runtime: `docker` or `local`.
        installs: whether the packages of `--requirements` are installed, or only resolved.
    """
    started = base.started if base else {}
    check_path("requirements", named := request.requirements or started.get("requirements", ""))
    requirements = settings.expanded("requirements", named).absolute() if named else None
    env = tuple(request.env or started.get("env", ()))
    inherited.parse(env)  # a typo is told first
    recorded = (base.script if base else None) or {}
    if script := request.script or recorded.get("script", ""):
        arguments = request.arguments or recorded.get("arguments", [])
        path = check_script(script, runs_dir())
        found = _packages(requirements, runtime, installs=installs)
        payload = Payload(path, tuple(arguments), (), requirements, found, _separate_chief(request, base), env)
        return payload.to_json(), payload, ""
    with packages.importable(requirements, installs=installs) if requirements else nullcontext() as here:
        resolved = configuration.resolve(request, base.config if base else None, here, data_dir())
    found = _packages(requirements, runtime, installs=installs)
    config, code_dirs, data = resolved
    if requirements and here in code_dirs:  # the preset is in one of the packages
        kept = packages.folder(requirements, packages.host_python())
        code_dirs = tuple(kept if folder == here else folder for folder in code_dirs)
    return config, Payload(code_dirs=code_dirs, requirements=requirements, packages=found, env=env), data


def _packages(requirements: Path | None, runtime: str, *, installs: bool) -> Path | None:
    """Return the folder with the packages of a requirements file for the Python that tasks run with."""
    if requirements is None:
        return None
    python = packages.IMAGE_PYTHON if runtime == "docker" else packages.host_python()
    return packages.prepare(requirements, python) if installs else packages.check(requirements, python)
