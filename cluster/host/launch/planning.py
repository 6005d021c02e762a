"""Turns a request into a plan. All checks are made here, and nothing is changed."""

import math
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cluster.contract import compatibility, settings, spec, strategies
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import GPUS, Started
from cluster.contract.spec import ClusterSpec, Role
from cluster.host import nvidia
from cluster.host.launch import configuration, resuming, user_files
from cluster.host.launch.folders import check_folder, data_dir, find_run, free_folder, runs_dir
from cluster.host.launch.plan import Plan
from cluster.host.launch.teardown import in_progress
from cluster.host.options import run_file
from cluster.host.options.request import OPTIONS, Needs, Request, check_needs, check_together
from cluster.host.runtime import mirror, registry, warm
from cluster.host.runtime.base import Runtime
from cluster.host.runtime.payload import Payload, parse_secrets
from cluster.host.runtime.resources import Job, parse_memory
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.messages import counted

DEVICE_FILES = {"tpu": ("/dev/accel*", "/dev/vfio/[0-9]*")}
"""The device files of the hardware that some strategies need, as glob patterns."""


def plan(typed: Request, *, stops_first: bool = False) -> Plan:
    """Check a request and return the plan of its run. Changes nothing except the cache of packages.

    With `stops_first` the run to resume may be in progress, because it is stopped before the plan is started.

    Raises:
        UsageError: the request is invalid.
        PrerequisiteError: this machine lacks a prerequisite.
    """
    settings.check_settings()
    previous: RunFolder | None = None
    started, request = Started(), typed
    if typed.resume or typed.again:
        previous, started, request = resuming.resume(typed)
    else:
        check_together(typed, scripted=bool(typed.script))
    check_hardware(request.strategy)
    cluster = build_cluster(request)
    run = _run_folder(typed, stops_first=stops_first)

    runtime, why_runtime = registry.choose_runtime(request.runtime or registry.AUTO, cluster.kind)
    job = _job(typed, request, runtime, cluster)
    gpus = nvidia.Placement() if runtime.is_remote else _place(typed, started.gpus, run, cluster)
    if devices_each := len(gpus.of("chief")) or int(job.gpus_per_task or 0):
        cluster = cluster.with_devices(devices_each, request.strategy or strategies.AUTO)
    check_devices(request, cluster, devices_each)

    base = previous.config if previous else None
    config, payload, data = _resolve(request, base, started, runtime, int(job.cpus_per_task or 0))
    elastic = elastic_record(typed, request, cluster)
    notes: list[str] = []
    if not payload.script:
        check_batch_and_precision(config, cluster, previous.load_config() if previous else None)
        check_elastic_batch(elastic, cluster, config)
        if typed.resume:
            notes = resuming.check_resumed(run, typed.preset, config, cluster)
    init = () if typed.resume else user_files.find_weights(config.get("init_from", ""), previous)
    parse_memory(typed.memory)  # a typo is reported first
    check_needs(typed, {Needs.CONTAINERS: runtime.limits_memory})
    memory = runtime.memory(request.memory, len(cluster.tasks))
    if ports := runtime.ports(len(cluster.tasks)):
        cluster = cluster.listening(ports)
    way_out = "where a script can fetch its data" if request.script else ""
    if cluster.kind.hardware:
        way_out = f"where they reach their {cluster.kind.hardware.upper()}"
    planned = Plan(
        run=run,
        cluster=cluster,
        data_dir=data_dir(),
        payload=payload,
        gpus=gpus,
        memory=memory,
        network=runtime.network(typed.network, request.network, way_out=way_out, serves=bool(cluster.members)),
        job=job,
        elastic=elastic,
        request=typed,
        options=request,
        runtime=runtime,
        why_runtime=why_runtime,
        compose={},
        config=config,
        data=data,
        tensorboard_port=request.board_port,
        replaces=typed.fresh and run.path.exists(),
        mirror="" if request.mirror == mirror.NONE else request.mirror,
        mirror_id=(started.mirror_id if typed.resume else "") or secrets.token_hex(8),
        previous=previous,
        init=init,
        about_resuming=tuple(notes),
    )
    in_use = {task: list(ids) for task, ids in gpus.ids.items()}  # recorded for other runs
    compose = runtime.render(planned) | ({GPUS: in_use} if in_use else {})
    check_needs(typed, {Needs.SHARED_IMPORT: "preload" in compose})
    return replace(planned, compose=compose, keep_s=_warm_s(typed) if "preload" in compose else 0.0)


def _warm_s(typed: Request) -> float:
    """Return for how many seconds after a run the process with TensorFlow's imports is kept for the next run."""
    text = typed.keep_warm or run_file.read_user_file().get("keep_warm", "0")
    seconds = 0.0 if text == "0" else spec.parse_age(text, "keep-warm")
    if seconds and (refused := warm.refusal()):
        print(f"no process stays for the next run: {refused}", file=sys.stderr)
        return 0.0
    return seconds


def _job(typed: Request, request: Request, runtime: Runtime, cluster: ClusterSpec) -> Job:
    check_needs(typed, {Needs.QUEUE: runtime.is_remote})
    if not runtime.is_remote:
        return Job()
    if typed.gpus:
        raise UsageError(f"--gpus {typed.gpus} with {runtime.tasks}: say how many each gets, with --gpus-per-task")
    for name in (field.name for field in fields(Job) if field.name not in runtime.job_options):
        if value := getattr(typed, name):
            raise UsageError(f"--{OPTIONS[name].key} {value} with {runtime.tasks}, which do not have it; leave it out")
    job = Job(**{name: str(getattr(request, name) or "") for name in runtime.job_options})
    for option in ("partition", "account", "time"):  # safe words for a shell
        if (value := getattr(job, option)) and not re.fullmatch("[A-Za-z0-9_.:,@/+-]+", value):
            raise UsageError(f"--{option} {value!r}: expected a word as Slurm has it; see `sinfo` and `sacctmgr`")
    if job.gpus_per_task:
        check_gpus(f"--gpus-per-task {job.gpus_per_task}", typed, cluster, int(job.gpus_per_task))
    return job


def check_gpus(option: str, request: Request, cluster: ClusterSpec, per_task: int = 0) -> None:
    """Check that the strategy can use an option's GPUs, and that each task has as many devices as GPUs, if known."""
    if cluster.kind.hardware:
        raise UsageError(f"{option} with --strategy {cluster.strategy}, which is for other hardware; leave one out")
    if per_task and request.devices not in (None, per_task):
        raise UsageError(f"--devices {request.devices} with {option}: each GPU is one, {per_task} a task; leave it out")


def check_devices(request: Request, cluster: ClusterSpec, gpus: int) -> None:
    """Check that several devices in each of several tasks are GPUs: TensorFlow would silently use only one CPU."""
    if cluster.strategy == "multiworker" and cluster.devices > 1 and not gpus and not request.script:
        workers = len(cluster.of(Role.WORKER))
        tasks = cluster.devices * (1 + workers)
        have = "on CPUs each task of MultiWorkerMirroredStrategy has one replica"
        given = f"--devices {cluster.devices} with --workers {workers}"
        raise UsageError(f"{given}: {have}; for {tasks} replicas use --workers {tasks - 1}, or --gpus")


def _place(typed: Request, recorded: Mapping[str, str], run: RunFolder, cluster: ClusterSpec) -> nvidia.Placement:
    if (requested := nvidia.choose_request(typed.gpus, recorded, cluster.devices)) is None:
        return nvidia.Placement()
    check_gpus(requested.text, typed, cluster)  # before nvidia-smi is asked
    machine = nvidia.read_machine(requested.text)
    busy: dict[str, str] = {}
    for other in (RunFolder(path.parent) for path in runs_dir().glob("*/compose.json") if path.parent != run.path):
        ids = [gpu for of_task in other.composed.get(GPUS, {}).values() for gpu in of_task]
        busy |= dict.fromkeys(ids, other.name) if ids and in_progress(other) else {}
    placed = nvidia.place_gpus(requested, machine, cluster, busy)
    check_gpus(requested.text, typed, cluster, len(placed.of("chief")))
    return replace(placed, requested=typed.gpus or recorded["gpus"])


def check_batch_and_precision(
    config: dict[str, Any], cluster: ClusterSpec, previous: Mapping[str, Any] | None = None
) -> None:
    """Check that the cluster's replicas can share the global batch and compute in the configuration's precision."""
    compatibility.check_precision(cluster, config.get("precision", "fp32"))
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
    request: Request, base: Path | None, started: Started, runtime: Runtime, cores: int
) -> tuple[dict[str, Any], Payload, str]:
    """Return the run's `config.json`, the payload of its tasks, and a description of the prepared data."""
    user_files.check_path("requirements", request.requirements)
    requirements = settings.expanded("requirements", request.requirements).absolute() if request.requirements else None
    env = tuple(request.env)
    payload = Payload(requirements=requirements, env=env, secrets=parse_secrets(request.secret, env))
    config: dict[str, Any] = {}
    data = ""
    if request.script:
        script = user_files.check_script(request.script, runs_dir())
        arguments, separate_chief = tuple(request.arguments), request.separate_chief
        payload = replace(payload, script=script, arguments=arguments, separate_chief=separate_chief)
    else:
        here = user_files.install_packages(requirements, registry.LOCAL.python) if requirements else None
        config, code_dirs, data = configuration.resolve_config(request, base, here, started.code_dirs, cores)
        payload = replace(payload, code_dirs=code_dirs)
    if requirements:
        payload = replace(payload, packages=user_files.install_packages(requirements, runtime.python))
    return config or payload.to_json(), payload, data


def build_cluster(request: Request) -> ClusterSpec:
    """Return the cluster of a request, which must already have the topology of the run that it resumes."""
    strategy = strategies.requested(request.strategy or strategies.AUTO)
    pipelines = 1
    if request.stages is not None:
        request, pipelines = _lay_out_stages(request, request.stages, strategy)
    return spec.build(
        workers=request.workers,
        ps=request.ps or 0,
        evaluator=request.evaluator,
        strategy=request.strategy or strategies.AUTO,
        devices=1 if request.devices is None else request.devices,
        separate_chief=not request.script or request.separate_chief,
        pipelines=pipelines,
    )


def _lay_out_stages(request: Request, stages: int, strategy: strategies.Strategy | None) -> tuple[Request, int]:
    """Return the request with a task or, in the only task, a device for each stage; and the number of pipelines."""
    if strategy is None or not strategy.staged:
        raise UsageError(f"--stages {stages} without --strategy pipeline: add that, or leave --stages out")
    if request.workers == 0:
        if request.devices not in (None, stages):
            raise UsageError(f"--stages {stages} with --workers 0: use --devices {stages}, not {request.devices}")
        return replace(request, devices=stages), 1
    workers = stages - 1 if request.workers is None else request.workers
    tasks = 1 + workers
    if tasks % stages:
        below = max(stages, tasks // stages * stages)
        problem = f"the chief and the workers are {tasks} tasks, which pipelines of {stages} cannot share"
        use = f"use --workers {below - 1} or {below + stages - 1}, or --workers 0 for the devices of one task"
        raise UsageError(f"--stages {stages} with --workers {workers}: {problem}; {use}")
    return replace(request, workers=workers), tasks // stages


def check_hardware(strategy: str) -> None:
    """Check that this machine has the hardware of a strategy, or a variable such as TPU_NAME that locates it."""
    requested = strategies.requested(strategy or strategies.AUTO)
    if requested is None or not requested.hardware:
        return
    patterns, name = DEVICE_FILES[requested.hardware], requested.hardware.upper()
    if not os.environ.get(f"{name}_NAME") and not any(any(Path("/").glob(pattern.lstrip("/"))) for pattern in patterns):
        problem = f"this machine has no {name} (no {' or '.join(patterns)})"
        fix = f"run this where there is one, or set {name}_NAME to one that this machine can reach"
        raise PrerequisiteError(f"--strategy {strategy}: {problem}; {fix}")


def elastic_record(typed: Request, request: Request, cluster: ClusterSpec) -> dict[str, Any]:
    """Return the part of `started.json` about lost workers, empty for none; `typed` is without inherited options."""
    least, workers = request.min_workers, len(cluster.of(Role.WORKER))
    if not cluster.kind.collective or cluster.kind.staged:
        if typed.min_workers is not None:
            why = "no task of it can be left out, or a lost one is already done without"
            raise UsageError(f"--min-workers {least} with {cluster.strategy_class}: {why}; leave it out")
        least = None
    elif typed.min_workers is not None and typed.min_workers > workers:
        use = f"use --min-workers {workers} or fewer, or --workers {least} or more"
        raise UsageError(f"--min-workers {least} with --workers {workers}: expected at most as many; {use}")
    if least is None:
        if typed.grow:
            raise UsageError("--grow without --min-workers: say how many workers are enough, such as --min-workers 1")
        return {}
    return {"min_workers": min(least, workers), "grow": request.grow}


def check_elastic_batch(elastic: Mapping[str, Any], cluster: ClusterSpec, config: Mapping[str, Any]) -> None:
    """Check that every number of replicas that an elastic run may have can share its global batch."""
    if not elastic or config.get("bitwise_elastic"):  # virtual shards need not be shared evenly
        return
    batch, parts = config["global_batch"], cluster.devices * config.get("micro_batches", 1)
    numbers = range(elastic["min_workers"], len(cluster.of(Role.WORKER)) + 1)
    every = math.lcm(*((1 + number) * parts for number in numbers))
    for number in reversed(numbers):
        replicas = (1 + number) * cluster.devices
        if batch % ((1 + number) * parts):
            option = f"--min-workers {elastic['min_workers']}"
            there = f"the {replicas} replicas of a run on {counted(number, 'worker')}, times micro-batches"
            use = f"use -- --global-batch {-(-batch // every) * every}"
            other = f"--bitwise-elastic {cluster.replicas} with a batch that it divides"
            raise UsageError(f"{option}: global batch {batch} is not divisible by {there}; {use}, or {other}")
