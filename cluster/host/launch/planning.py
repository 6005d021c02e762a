"""From what was requested on the command line to a plan: everything is checked here, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cluster.contract import compatibility, settings, spec
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Started
from cluster.contract.spec import ClusterSpec, Role
from cluster.host.gpu import devices, placement
from cluster.host.gpu.placement import Placement
from cluster.host.launch import configuration, resuming
from cluster.host.launch.folders import check_folder, data_dir, find_run, free_folder, runs_dir
from cluster.host.launch.inputs import initial, packages
from cluster.host.launch.inputs.scripts import check_path, check_script
from cluster.host.launch.plan import Plan
from cluster.host.launch.teardown import in_progress
from cluster.host.options import elastic
from cluster.host.options.option import Needs
from cluster.host.options.request import OPTIONS, Request, check_needs, check_together
from cluster.host.options.topology import check_hardware
from cluster.host.options.topology import topology as topology_of
from cluster.host.runtime import debugging, inherited, registry
from cluster.host.runtime import resources as limits
from cluster.host.runtime.base import Runtime, Workload
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import PRIVATE, Job, Memory, Network
from cluster.system.errors import UsageError


@dataclass(frozen=True)
class _Previous:
    """What was requested of the run to go on with, or to repeat; nothing for a new run."""

    run: RunFolder | None = None
    cluster: ClusterSpec | None = None
    started: Started = field(default_factory=Started)
    script: Mapping[str, Any] = field(default_factory=dict)


def plan(request: Request, *, stops_first: bool = False, installs: bool = True) -> Plan:
    """Check a request and return what would be started. Changes nothing.

    Args:
        request: what is requested.
        stops_first: whether the run to resume may be in progress, because it is stopped before the plan is started.
        installs: whether the packages of `--requirements` are installed, or only resolved: the plan is not started.

    Raises:
        UsageError: something requested cannot be done.
        PrerequisiteError: something that this machine must have is missing.
    """
    settings.check()
    check_together(request, scripted=None if request.resume or request.again else bool(request.script))
    previous = _load(request)

    topology = topology_of(request, previous.cluster) | {"separate_chief": _separate_chief(request, previous)}
    check_hardware(topology["strategy"])
    cluster = spec.build(**topology)
    kept = _kept(request, previous)
    port, hang_timeout_s = kept.board_port, kept.number("hang_timeout")
    run = _run_folder(request, stops_first=stops_first)

    runtime, why_runtime = registry.choose(request.runtime or _queue(previous) or registry.AUTO, cluster.kind)
    _check_prepares(cluster, runtime)
    job = _job(request, previous, runtime, cluster)
    gpus = Placement() if runtime.is_remote else _place(request, run, previous, cluster)
    waits = debugging.parse_debugger(request.debug, cluster)
    if devices_each := len(gpus.of("chief")) or int(job.gpus_per_task or 0):
        # each GPU is a device, which decides between the strategies of one process
        cluster = spec.build(**topology | {"devices": devices_each})

    config, payload, data = _resolve(request, previous, runtime, int(job.cpus_per_task or 0), installs=installs)
    elastic_run = elastic.parse(request, cluster, previous.started if request.resume else Started())
    about_resuming: list[str] = []
    if payload.script is None:
        check_sharing(config, cluster, previous.run.load_config() if previous.run else None)
        elastic.check_batch(elastic_run, cluster, config)
        if request.resume:
            about_resuming = resuming.check(run, request.preset, config, cluster)

    memory = _memory(request, previous, runtime, len(cluster.tasks))
    if ports := runtime.ports(len(cluster.tasks)):
        cluster = cluster.listening(ports)
    network = _network(request, previous, runtime, cluster, payload)
    debugging.check_reachable(
        waits,
        remote=runtime.tasks if runtime.is_remote else "",
        private=network.name == PRIVATE and not runtime.publishes_ports,
        detached=request.detach,
    )
    work = Workload(
        run=run,
        cluster=cluster,
        data_dir=data_dir(),
        payload=payload,
        gpus=gpus,
        memory=memory,
        network=network,
        job=job,
        elastic=elastic_run,
        debugger=waits,
    )
    return Plan(
        **vars(work),
        request=request,
        runtime=runtime,
        why_runtime=why_runtime,
        compose=runtime.render(work) | gpus.record(),
        config=config,
        data=data,
        tensorboard_port=port,
        hang_timeout_s=0 if waits else hang_timeout_s,
        max_restarts=kept.number("max_restarts"),
        max_external_restarts=kept.number("max_external_restarts"),
        replaces=request.fresh and run.path.exists(),
        previous=previous.run,
        init=() if request.resume else initial.find(config.get("init_from", ""), previous.run),
        about_resuming=tuple(about_resuming),
    )


def _load(request: Request) -> _Previous:
    """Return the run to resume or to repeat."""
    if not request.resume and not request.again:
        return _Previous()
    run = find_run(request.resume or request.again)
    if not request.trust:
        provenance.check(run)  # before anything is believed that it says
    script = run.script or {}
    check_together(request, scripted=bool(script))
    return _Previous(run, run.load_cluster(), run.started, script)


def _kept(request: Request, previous: _Previous) -> Request:
    """Return the request with the bounds that the run was started with, unless it gives others."""
    kept: dict[str, Any] = {}
    for name in ("hang_timeout", "max_restarts", "max_external_restarts"):
        key = "hang_timeout_s" if name == "hang_timeout" else name
        value = getattr(previous.started, key)
        if value is not None and (name, value) != ("hang_timeout", 0):  # 0: a task was debugged, and is not any more
            kept[name] = getattr(request, name) or str(int(value))
    if previous.run and not request.tensorboard_port and previous.run.board_port == 0:
        kept["tensorboard_port"] = "0"
    return replace(request, **kept)


def _separate_chief(request: Request, previous: _Previous) -> bool:
    """Return whether TF_CONFIG has a chief beside the workers: always, but for a script without `--separate-chief`."""
    if not request.script and not previous.script:
        return True
    return request.separate_chief or bool(previous.script.get("separate_chief"))


def _memory(request: Request, previous: _Previous, runtime: Runtime, num_tasks: int) -> Memory:
    """Return the memory limit of each task, as requested now or when the run was started."""
    limits.parse_memory(request.memory)  # a typo is reported first
    check_needs(request, {Needs.CONTAINERS: runtime.limits_memory})
    return runtime.memory(request.memory, previous.started.memory, num_tasks)


def _network(
    request: Request, previous: _Previous, runtime: Runtime, cluster: ClusterSpec, payload: Payload
) -> Network:
    """Return the network that the tasks get."""
    way_out = "where a script can fetch its data" if payload.script else ""
    if cluster.kind.hardware:
        way_out = f"where they reach their {cluster.kind.hardware.upper()}"
    if request.debug:
        way_out = "where a debugger reaches them"
    serves = bool(cluster.members)
    return runtime.network(request.network, previous.started.network, way_out=way_out, serves=serves)


def _queue(previous: _Previous) -> str:
    """Return the runtime of a run that was queued: it goes on there unless another is requested; empty otherwise."""
    name = previous.started.runtime
    return name if name in registry.RUNTIMES and registry.RUNTIMES[name].is_remote else ""


def _job(request: Request, previous: _Previous, runtime: Runtime, cluster: ClusterSpec) -> Job:
    """Return the request to the queue, made now or when the run was started."""
    check_needs(request, {Needs.QUEUE: runtime.is_remote})
    if not runtime.is_remote:
        return Job()
    check_needs(request, {Needs.GPUS: bool(request.gpus_per_task)})
    if request.gpus:
        raise UsageError(f"--gpus {request.gpus} with {runtime.tasks}: say how many each gets, with --gpus-per-task")
    if request.gpu_runtime:
        raise UsageError(f"--gpu-runtime {request.gpu_runtime} with {runtime.tasks}: it is for containers")
    for name in (each.name for each in fields(Job) if each.name not in runtime.job_options):
        if value := getattr(request, name):
            raise UsageError(f"--{OPTIONS[name].key} {value} with {runtime.tasks}: they have no such; leave it out")
    recorded = previous.started.job
    requested = {name: str(getattr(request, name) or recorded.get(name, "")) for name in runtime.job_options}
    if image := requested.get("apptainer"):  # a run goes on from any folder
        requested["apptainer"] = str(Path(os.path.expanduser(image)).absolute())  # noqa: PTH111
    job = Job(**requested)
    job.check()
    if job.gpus_per_task and request.devices and request.devices != job.gpus_per_task:
        raise UsageError(
            f"--devices {request.devices} with --gpus-per-task {job.gpus_per_task}: a task has a replica on each "
            "of its GPUs; leave --devices out"
        )
    if job.gpus_per_task and cluster.kind.hardware:
        raise UsageError(f"--gpus-per-task with --strategy {cluster.strategy}: leave one of them out")
    return job


def _place(request: Request, run: RunFolder, previous: _Previous, cluster: ClusterSpec) -> Placement:
    """Return which task gets which of this machine's GPUs."""
    recorded = previous.started.gpus
    requested = placement.requested(request.gpus, request.gpus_per_task, recorded, cluster.devices)
    check_needs(request, {Needs.GPUS: requested is not None})
    if requested is None:
        return Placement()
    if cluster.kind.hardware:
        hardware = cluster.kind.hardware.upper()
        raise UsageError(
            f"{requested.text} with --strategy {cluster.strategy}: one run trains on GPUs or on a {hardware}; leave "
            "one of them out"
        )
    way, level = placement.device_handling(
        request.gpu_runtime or recorded.get("runtime", ""), request.nccl_debug or recorded.get("nccl_debug", "")
    )
    machine = devices.machine(requested.text, with_instances=any(name.startswith("MIG-") for name in requested.ids))
    placed = placement.place(requested, machine, cluster, busy(run))
    each = len(placed.of("chief"))
    if request.devices and cluster.devices != each:
        raise UsageError(
            f"--devices {request.devices} with {requested.text}: a task with {each} GPUs has as many replicas; leave "
            "--devices out, or request as many GPUs"
        )
    words = request.gpus if request.gpus or request.gpus_per_task else recorded["gpus"]
    return replace(placed, requested=words, device_request=way, nccl_debug=level)


def _check_prepares(cluster: ClusterSpec, runtime: Runtime) -> None:
    workers = len(cluster.of(Role.DATA_WORKER))
    if workers and runtime.is_remote:
        raise UsageError(
            f"--data-workers {workers} with --runtime {runtime.name}, which has none yet: use --runtime docker or "
            "local, or leave it out"
        )


def busy(run: RunFolder | None = None) -> dict[str, str]:
    """Return the GPUs that runs of this folder other than this one train on, each with the name of its run."""
    own = run.path if run else None
    others = (RunFolder(path.parent) for path in runs_dir().glob("*/compose.json") if path.parent != own)
    used = {other: placement.ids_in(other.composed) for other in others}
    return {gpu: other.name for other, ids in used.items() if ids and in_progress(other) for gpu in ids}


def check_sharing(config: dict[str, Any], cluster: ClusterSpec, previous: Mapping[str, Any] | None = None) -> None:
    """Check that the cluster's replicas can share the configuration's global batch, and compute in its precision.

    Raises:
        UsageError: they cannot.
    """
    compatibility.check_precision(cluster, config.get("precision", "fp32"))
    compatibility.check_data_workers(cluster, config)
    compatibility.check_stages(cluster, config, previous)
    if shards := config.get("bitwise_elastic", 0):  # the training program has checked that they cut the batch evenly
        compatibility.check_shards(cluster, shards)
    else:
        compatibility.check_micro_batches(config["global_batch"], cluster.batch_divisor, config.get("micro_batches", 1))


def _run_folder(request: Request, *, stops_first: bool) -> RunFolder:
    if request.resume:
        run = find_run(request.resume)
    elif request.name:
        run = RunFolder(runs_dir() / spec.check_run_name(request.name))
    else:
        run = free_folder(spec.check_run_name(request.run_name()))
    if not stops_first:
        check_folder(run, resumes=bool(request.resume), replaces=request.fresh)
    return run


def _resolve(
    request: Request, previous: _Previous, runtime: Runtime, cores: int, *, installs: bool
) -> tuple[dict[str, Any], Payload, str]:
    """Return the run's `config.json`, what its tasks bring along, and in words what data is there for them already.

    Args:
        request: what is requested.
        previous: the run to go on with, or to repeat.
        runtime: what runs the tasks.
        cores: that each task can use, where a queue chooses its machine; 0: those of this machine.
        installs: whether the packages of `--requirements` are installed, or only resolved.
    """
    started = previous.started
    check_path("requirements", named := request.requirements or started.requirements)
    requirements = settings.expanded("requirements", named).absolute() if named else None
    env = tuple(request.env or started.env)
    secrets = inherited.parse_secrets(request.secret or started.secrets, env)
    if script := request.script or previous.script.get("script", ""):
        arguments = request.arguments or previous.script.get("arguments", [])
        path = check_script(script, runs_dir())
        found = _packages(requirements, runtime.python, installs=installs)
        payload = Payload(
            path, tuple(arguments), (), requirements, found, _separate_chief(request, previous), env, secrets
        )
        return payload.to_json(), payload, ""
    with packages.importable(requirements, installs=installs) if requirements else nullcontext() as here:
        base = previous.run.config if previous.run else None
        config, code_dirs, data = configuration.resolve(request, base, here, data_dir(), started.code_dirs, cores)
    found = _packages(requirements, runtime.python, installs=installs)
    if requirements and here in code_dirs:  # the preset is in one of the packages
        kept = packages.folder(requirements, packages.host_python())
        code_dirs = tuple(kept if folder == here else folder for folder in code_dirs)
    return (
        config,
        Payload(code_dirs=code_dirs, requirements=requirements, packages=found, env=env, secrets=secrets),
        data,
    )


def _packages(requirements: Path | None, python: str, *, installs: bool) -> Path | None:
    if requirements is None:
        return None
    return packages.prepare(requirements, python) if installs else packages.check(requirements, python)
