"""Resuming or repeating a run: the options that its request inherits, and those that it must not change.

A checkpoint fits only one model, and its step only one order of the data.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from cluster.contract import strategies
from cluster.contract.run import provenance
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.launch_records import Started
from cluster.contract.spec import DEFAULT_WORKERS, ClusterSpec, Role
from cluster.host.launch.folders import find_run
from cluster.host.options.request import OPTIONS, Request, check_together
from cluster.host.options.run_file import VARIABLES, flatten, merge_by_name
from cluster.host.runtime import registry
from cluster.host.runtime.resources import Job
from cluster.system.errors import UsageError
from cluster.system.json_files import read_json_lines

_OTHER_EXAMPLES, _OTHER_VARIABLES = "it would skip or repeat data", "its checkpoint would not fit"
SWITCHES = ("optimizer.ema", "optimizer.momentum")
"""The options whose presence, not value, decides which variables a checkpoint has."""
FIXED = {
    **dict.fromkeys(("dataset", "source", "seed", "global_batch"), _OTHER_EXAMPLES),
    **dict.fromkeys(("model", "freeze", "optimizer.name"), _OTHER_VARIABLES),
    "init_from": "has begun with other weights",
}
"""The options that a run with a checkpoint cannot change, and the reason."""
TOLERANCE = 1e-3
"""Tolerance in epochs, since rows in `metrics/` are rounded."""


def resume(request: Request) -> tuple[RunFolder, Started, Request]:
    """Return the run that a request resumes or repeats, how it was started, and the request with inherited options.

    Options that the request sets are kept. The run must be this user's, unless the request trusts it.
    """
    check_together(request, scripted=None)
    run = find_run(request.resume or request.again)
    if not request.trust:
        provenance.check_trusted(run)  # before any of its records is believed
    script = run.script
    check_together(request, scripted=bool(script))
    cluster, started = run.load_cluster(), run.started
    kept = ["max_restarts", "max_external_restarts", "memory", "network", "requirements", "env"]
    if request.resume:
        kept += ["min_workers", "grow", "metrics_port", "mirror"]
    recorded = {name: getattr(started, name) for name in kept}
    recorded |= {job_field.name: started.job.get(job_field.name) for job_field in fields(Job)}
    recorded |= {"secret": started.secrets, "hang_timeout": started.hang_timeout_s}
    if started.runtime in registry.RUNTIMES and registry.RUNTIMES[started.runtime].is_remote:
        recorded |= {"runtime": started.runtime}  # queue the run there again
    if run.board_port == 0:
        recorded |= {"tensorboard_port": "0"}
    if script:
        recorded |= {"script": script["script"], "args": script.get("arguments", ())}
        recorded |= {"separate_chief": script.get("separate_chief", False)}
    inherited: dict[str, Any] = {name: merge_by_name(recorded.pop(name), getattr(request, name)) for name in VARIABLES}
    for name, value in recorded.items():
        option = OPTIONS.get(name)  # none declares `args`
        is_given = option.is_given(getattr(request, name)) if option else bool(getattr(request, name))
        if not is_given and value not in (None, ""):
            number = int(value) if isinstance(value, float) else value
            inherited[name] = option.parse(number) if option else number
    return run, started, inherit_topology(replace(request, **inherited), cluster)


def inherit_topology(request: Request, previous: ClusterSpec) -> Request:
    """Return a request with the topology of the previous run, except for the parts that it sets itself."""
    requested = strategies.requested(request.strategy or strategies.AUTO)
    evaluator = request.evaluator or bool(previous.of(Role.EVALUATOR))
    if request.stages is not None:
        return replace(request, evaluator=evaluator, strategy=requested.name if requested else previous.strategy)
    alone = requested is not None and requested.one_process
    previous_workers = len(previous.of(Role.WORKER))
    if requested and not alone and not previous_workers:
        previous_workers = DEFAULT_WORKERS
    if (workers := request.workers) is None:
        workers = 0 if alone else previous_workers
    if (ps := request.ps) is None:
        ps = 0 if not workers or (requested and not requested.served) else len(previous.of(Role.PS))
    if (devices := request.devices) is None:
        devices = 1 if requested and requested.single_device else previous.devices
    strategy, stages = request.strategy or strategies.AUTO, None
    if not request.strategy and previous.kind.one_process == (workers == 0) and request.ps is None:
        # Keep `auto` if the previous strategy was chosen by it: the number of devices may choose another one now.
        counts = (len(previous.of(Role.WORKER)), len(previous.of(Role.PS)), previous.devices)
        chosen = strategies.resolve(strategies.AUTO, *counts) == previous.kind
        strategy = strategies.AUTO if chosen else previous.strategy
        if previous.kind.staged and workers and previous_workers == workers:
            stages = previous.stages
    request = replace(request, workers=workers, ps=ps, evaluator=evaluator)
    return replace(request, strategy=strategy, devices=devices, stages=stages)


def check_resumed(run: RunFolder, preset: str, config: Mapping[str, Any], cluster: ClusterSpec) -> list[str]:
    """Check that a run can be resumed with a preset, a configuration and a cluster; return notes for the user."""
    before = run.load_config()
    if preset and preset != before.get("preset", preset):
        raise UsageError(f"--preset {preset}: run {run.name!r} has {before['preset']}; {_way_out(run)}")
    if not (done := max(run.saved_steps, default=0)):
        return []
    trained, wanted = dict(flatten(before)), dict(flatten(config))
    # The optimizers of tf_keras have a variable more if callbacks may set the rate.
    switches = (*SWITCHES, "callbacks") if cluster.kind.legacy_fit and config.get("loop") == "fit" else SWITCHES
    for name, why in {**FIXED, **dict.fromkeys(switches, _OTHER_VARIABLES)}.items():
        previous, requested = trained.get(name), wanted.get(name)
        if name in switches:
            differs = bool(previous) != bool(requested)
        else:
            differs = previous != requested and None not in (previous, requested)
        if differs:
            option = f"--{name.replace('_', '-')} {requested or repr(requested)}"  # some may be empty
            done_so = f"run {run.name!r} has trained {done} steps with {previous or repr(previous)}"
            raise UsageError(f"{option}: {done_so}, and {why}; {_way_out(run)}")
    _check_keras(run, before, config, cluster)
    return _check_length(run, before, config, done) + _about_shards(run, config, cluster)


def _about_shards(run: RunFolder, config: Mapping[str, Any], cluster: ClusterSpec) -> list[str]:
    """Return a note if the number of shards of a user function's datasets has changed."""
    if config.get("source") != "function":
        return []
    shards = config.get("bitwise_elastic")
    previous, requested = shards or run.load_cluster().replicas, shards or cluster.replicas
    if previous == requested:
        return []
    return [
        f"a tf.data.Dataset of --source function has {requested} shards now, {previous} before: this epoch continues "
        "at the same step with other examples; a random-access source continues at the same example"
    ]


def _check_keras(run: RunFolder, before: Mapping[str, Any], config: Mapping[str, Any], cluster: ClusterSpec) -> None:
    previous = before.get("loop") == "fit" and run.load_cluster().kind.legacy_fit
    requested = config.get("loop") == "fit" and cluster.kind.legacy_fit
    if previous != requested:
        names = {True: "tf_keras", False: "Keras 3"}
        option = f"--loop {config.get('loop')} on {len(cluster.members) or 1} tasks trains with {names[requested]}"
        had = f"run {run.name!r} has trained with {names[previous]}, whose checkpoints it cannot read"
        raise UsageError(f"{option}: {had}; {_way_out(run)}")


def _check_length(run: RunFolder, before: Mapping[str, Any], config: Mapping[str, Any], done: int) -> list[str]:
    """Return a note if nothing is left to train; raise UsageError if less was requested than is done."""
    most = config.get("max_steps")
    if most is not None and most < done:
        raise UsageError(f"--max-steps {most}: run {run.name!r} has done {done} steps already; request more")
    epochs = config.get("epochs")
    rows = [row for row in read_json_lines(run.metrics("chief")) if row.get("step") and row.get("epoch")]
    if epochs is None or not rows:
        return []
    done_epochs = done * rows[-1]["epoch"] / rows[-1]["step"]
    # An epoch's last step runs into the next one, so a run that kept its epochs may have done a little more.
    if epochs != before.get("epochs") and epochs < done_epochs - TOLERANCE:
        raise UsageError(f"--epochs {epochs:g}: run {run.name!r} has done {done_epochs:.2f} already; request more")
    if most != done and epochs > done_epochs:
        return []
    limit = "--max-steps" if most == done else "--epochs"
    return [f"run {run.name} has done all of its {done} steps; a larger {limit} trains on"]


def _way_out(run: RunFolder) -> str:
    return f"leave it out, or start a new run (`--name {run.name} --fresh` starts this one again)"
