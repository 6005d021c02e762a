"""What is requested of `up` and `plan`: every option, declared once, and which of them go together."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.contract import strategies
from cluster.contract.recovery.attempts import MAX_EXTERNAL_RESTARTS, MAX_RESTARTS
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S
from cluster.contract.spec import parse_count
from cluster.host.options.option import Group, Needs, check_choices, declared, option, switch
from cluster.host.runtime import registry, tensorboard
from cluster.system.errors import UsageError
from cluster.system.paths import ROOT

PRESET, PRESETS = "fashion_mnist", ROOT / "train" / "presets"
LOOPS = ("custom", "fit")
SCHEDULES = ("gpipe", "1f1b", "pipedream")
PARTITIONS = ("flops", "measured")
WORKERS = "2"
_ONE_OF_RUNTIMES = f"{', '.join([registry.AUTO, *list(registry.RUNTIMES)[:-1]])} or {list(registry.RUNTIMES)[-1]}"
_ONE_OF_STRATEGIES = ", ".join([strategies.AUTO, *list(strategies.STRATEGIES)[:-1]])


@dataclass(frozen=True)
class Request:
    """What is requested, as typed; empty is what was left out."""

    workers: str = option(
        Group.TRAINS,
        "worker tasks beside the chief; 0: the chief alone",
        f"{WORKERS}; 0 for a strategy of one process",
        kinds=(int,),
    )
    ps: str = option(Group.TRAINS, "parameter servers; 1 or more: ParameterServerStrategy", 0, kinds=(int,))
    evaluator: bool = switch(Group.TRAINS, "add a task that evaluates every new checkpoint", needs=Needs.TRAINER)
    data_workers: str = option(
        Group.TRAINS,
        "tasks that prepare batches for those that train, by tf.data's service; with --source function",
        0,
        kinds=(int,),
        needs=Needs.TRAINER,
    )
    strategy: str = option(
        Group.TRAINS, f"{_ONE_OF_STRATEGIES} or {list(strategies.STRATEGIES)[-1]}", "auto, from the topology"
    )
    devices: str = option(
        Group.TRAINS,
        "replicas in each training task, on logical CPUs; with --gpus as many as its GPUs",
        1,
        kinds=(int,),
    )
    preset: str = option(
        Group.TRAINS,
        f"{', '.join(sorted(path.stem for path in PRESETS.glob('[a-z]*.py')))} or package.module:function",
        PRESET,
        needs=Needs.TRAINER,
    )
    loop: str = option(
        Group.TRAINS, "custom, or fit for Keras's own", LOOPS[0], choices=LOOPS, needs=Needs.TRAINER, is_override=True
    )
    precision: str = option(
        Group.TRAINS,
        "fp32, bf16 or fp16: what layers compute in; weights stay in float32",
        "fp32",
        needs=Needs.TRAINER,
        is_override=True,
    )
    bitwise_elastic: str = option(
        Group.TRAINS,
        "virtual shards V: any number of replicas up to V gives the same bits",
        "0, none",
        kinds=(int,),
        needs=Needs.TRAINER,
        is_override=True,
    )
    stages: str = option(
        Group.TRAINS,
        "with --strategy pipeline: stages, each a task; with --workers 0 each a device of the chief",
        "as many as tasks and devices",
        kinds=(int,),
        needs=Needs.TRAINER,
    )
    micro_batches: str = option(
        Group.TRAINS,
        "parts of each replica's batch whose gradients are added up before an update, for less memory",
        1,
        kinds=(int,),
        needs=Needs.TRAINER,
        is_override=True,
    )
    schedule: str = option(
        Group.TRAINS,
        "with --strategy pipeline: gpipe, 1f1b or pipedream",
        SCHEDULES[0],
        choices=SCHEDULES,
        needs=Needs.TRAINER,
    )
    remat: bool = switch(
        Group.TRAINS,
        "with --strategy pipeline: compute activations again for the backward instead of keeping them",
        needs=Needs.TRAINER,
    )
    partition_by: str = option(
        Group.TRAINS,
        "with --strategy pipeline: what the cut evens out, flops, or measured, the times of its blocks on this machine",
        PARTITIONS[0],
        choices=PARTITIONS,
        needs=Needs.TRAINER,
    )
    cut: str = option(
        Group.TRAINS,
        "with --strategy pipeline: the first layer of each stage but the first, such as dense,logits",
        "the best one",
        needs=Needs.TRAINER,
    )
    init_from: str = option(
        Group.TRAINS,
        "begin with the weights of this run's newest checkpoint, or of a .weights.h5, .keras, .h5, .npz or .index file",
        "random ones",
        needs=Needs.NEW_RUN,
        is_override=True,
    )
    script: str = option(
        Group.TRAINS,
        "run this script, which reads TF_CONFIG, in every task; its arguments follow --",
        "our trainer",
        needs=Needs.NEW_RUN,
        is_path=True,
    )
    separate_chief: bool = switch(
        Group.TRAINS,
        "give the script's TF_CONFIG a chief, as with --ps",
        "no, it is worker 0",
        needs=Needs.SCRIPT,
    )
    requirements: str = option(Group.TRAINS, "requirements file with packages for your own code", "none", is_path=True)
    env: Sequence[str] = option(
        Group.TRAINS,
        "variable for every task: NAME, with its value here, or NAME=VALUE; may be repeated",
        "none",
        empty=(),
        kinds=(list,),
    )
    secret: Sequence[str] = option(
        Group.TRAINS,
        "NAME=FILE: variable for every task whose value is in this file, and nowhere else; may be repeated",
        "none",
        empty=(),
        kinds=(list,),
        is_path=True,
    )
    runtime: str = option(Group.RUNS, _ONE_OF_RUNTIMES, "auto: containers where a Docker Engine answers")
    network: str = option(
        Group.RUNS,
        "private; or for local tasks host, the machine's; for containers egress, with a way out; in a Swarm encrypted",
        "private; host for local scripts and TPUs",
    )
    memory: str = option(
        Group.RUNS,
        "memory limit of each container, such as 8GiB; a container that exceeds it is killed",
        "its share of the machine's memory",
        needs=Needs.CONTAINERS,
    )
    gpus: str = option(
        Group.RUNS,
        "none, all, how many, or ids such as 0,1: for the chief and the workers",
        "none, they see none",
        kinds=(int, str),
    )
    gpus_per_task: str = option(Group.RUNS, "GPUs of each of these tasks", "--gpus divided evenly", kinds=(int,))
    gpu_runtime: str = option(
        Group.RUNS, "how containers get them: reserve, cdi, or the older nvidia", "reserve", needs=Needs.GPUS
    )
    partition: str = option(
        Group.RUNS,
        "Slurm partition, or several with commas; of a Swarm the nodes labelled tf-cluster.partition=NAME",
        "the site's",
        needs=Needs.QUEUE,
    )
    constraint: str = option(
        Group.RUNS,
        "nodes of a Swarm that take tasks, such as node.labels.gpu==true; several with commas",
        "all",
        needs=Needs.QUEUE,
    )
    time: str = option(
        Group.RUNS,
        "time limit of the job, such as 90 or 2-12:00; at its end the run saves and is queued again",
        "the partition's",
        kinds=(int, str),
        needs=Needs.QUEUE,
    )
    account: str = option(Group.RUNS, "Slurm account to charge", "yours", needs=Needs.QUEUE)
    nodes: str = option(
        Group.RUNS,
        "nodes that the job's tasks are spread over",
        "as Slurm places them",
        kinds=(int,),
        needs=Needs.QUEUE,
    )
    cpus_per_task: str = option(
        Group.RUNS, "processors of each task", "the scheduler's", kinds=(int,), needs=Needs.QUEUE
    )
    apptainer: str = option(
        Group.RUNS,
        "image of Apptainer that the tasks of a Slurm job run in, a file that every node sees",
        "none, they run in this environment",
        needs=Needs.QUEUE,
        is_path=True,
    )
    checkpoint_every: str = option(
        Group.KEPT,
        "optimizer steps such as 200, or seconds such as 30s, between two checkpoints",
        "auto",
        kinds=(int, str),
        needs=Needs.TRAINER,
        is_override=True,
    )
    hang_timeout: str = option(
        Group.KEPT,
        "seconds without a new step after which every task starts again",
        f"{HANG_TIMEOUT_S:g}",
        kinds=(int,),
        bounds=(1, 86_400),
    )
    max_restarts: str = option(
        Group.KEPT,
        "restarts of a program that fails by itself and makes no progress",
        MAX_RESTARTS,
        kinds=(int,),
        bounds=(0, 1000),
    )
    max_external_restarts: str = option(
        Group.KEPT,
        "restarts in a row of what is killed from outside and makes no progress",
        MAX_EXTERNAL_RESTARTS,
        kinds=(int,),
        bounds=(0, 100_000),
    )
    min_workers: str = option(
        Group.KEPT,
        "workers that are enough: the run goes on without those that stay away, at the same global batch",
        "all",
        kinds=(int,),
        needs=Needs.TRAINER,
    )
    grow: bool = switch(
        Group.KEPT,
        "with --min-workers: take in workers that return, at the next checkpoint",
        "no, they wait for `invoke scale`",
        needs=Needs.TRAINER,
    )
    name: str = option(Group.KEPT, "name of the run", "preset, date and time", needs=Needs.NEW_RUN)
    resume: str = option(
        Group.KEPT, "go on with this run, on its own topology unless another is given", "start a new run"
    )
    trust: bool = switch(
        Group.KEPT,
        "take a run that this user did not start here, or that was changed since",
        needs=Needs.EARLIER_RUN,
    )
    fresh: bool = switch(Group.KEPT, "start a run of this --name again, its old folder is deleted", needs=Needs.NEW_RUN)
    log_to: str = option(
        Group.WATCHED,
        "where metrics go besides: csv, mlflow, wandb, separated by commas",
        "the run folder and TensorBoard alone",
        needs=Needs.TRAINER,
        is_override=True,
    )
    tensorboard_port: str = option(
        Group.WATCHED,
        f"port of TensorBoard on 127.0.0.1, or auto: that of the running one, or {tensorboard.PORT}, or a free one; "
        "0: none",
        tensorboard.AUTO,
        kinds=(int, str),
        bounds=(0, 65535),
    )
    detach: bool = switch(Group.WATCHED, "return once every task is training", "stay until the end")
    debug: str = option(
        Group.WATCHED,
        "task that waits for a debugger before it trains, such as worker-0, or worker-0:PORT",
        "none",
        needs=Needs.TRAINER,
    )
    nccl_debug: str = option(Group.WATCHED, "what NCCL logs: VERSION, WARN, INFO or TRACE", "WARN", needs=Needs.GPUS)
    again: str = ""
    """The run to make once more, in a folder of its own."""
    overrides: Sequence[str] = ()
    """The words after `--`: overrides of the training configuration, or a script's arguments."""
    train: Sequence[str] = ()
    """The training overrides of a run file."""
    args: Sequence[str] = ()
    """The script's arguments in a run file."""
    code_dir: str = ""
    """Where modules of the user's own are found besides the current folder: beside the run file."""

    @property
    def asks_for_help(self) -> bool:
        """Whether the training options are to be shown."""
        return not self.script and any(word in ("--help", "-h") for word in self.overrides)

    def training(self) -> list[str]:
        """Return the overrides of the training configuration, those that are options of `up` first."""
        ours = [each for each in OPTIONS.values() if each.is_override and getattr(self, each.name)]
        words = [word for each in ours for word in (f"--{each.key}", getattr(self, each.name))]
        stages = [OPTIONS[name] for name in ("schedule", "partition_by", "cut") if getattr(self, name)]
        words += [word for each in stages for word in (f"--pipeline.{each.key}", getattr(self, each.name))]
        words += ["--pipeline.remat"] if self.remat else []
        return [*words, *self.train, *self.overrides]

    def number(self, name: str) -> int:
        """Return an option as a number, or its default.

        Raises:
            UsageError: it is none, or out of its bounds.
        """
        declaration = OPTIONS[name]
        return parse_count(declaration.key, getattr(self, name) or declaration.default, *declaration.bounds)

    @property
    def board_port(self) -> int | None:
        """The port of TensorBoard; None: any, 0: no TensorBoard."""
        return None if self.tensorboard_port in ("", tensorboard.AUTO) else self.number("tensorboard_port")

    @property
    def arguments(self) -> Sequence[str]:
        """The script's arguments: those of the command line, or else of the run file."""
        return self.overrides or self.args

    def run_name(self) -> str:
        """Return what the run is called unless it was given a name."""
        origin = self.again or (Path(self.script).stem if self.script else self.preset or PRESET)
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", origin).strip("-._")[:40] or "run"
        return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"


OPTIONS = declared(Request)
"""Every option by the name of its field, in the order of the help."""


def check_together(request: Request, *, scripted: bool | None) -> None:
    """Check that the options of a request go together.

    Args:
        request: the request.
        scripted: whether the tasks run a script; None: as in the earlier run that it names.

    Raises:
        UsageError: they do not.
    """
    check_choices(list(OPTIONS.values()), vars(request))
    met = {Needs.NEW_RUN: not request.resume, Needs.EARLIER_RUN: bool(request.resume or request.again)}
    check_needs(request, met if scripted is None else met | {Needs.TRAINER: not scripted, Needs.SCRIPT: scripted})


def check_needs(request: Request, met: Mapping[Needs, bool]) -> None:
    """Check that nothing was given whose needs are known not to be met.

    Raises:
        UsageError: something was; the message names all with the same needs.
    """
    given = {f"--{each.key}": each.needs for each in OPTIONS.values() if getattr(request, each.name)}
    given |= {"[train]": Needs.TRAINER} if request.train else {}
    given |= {"args": Needs.SCRIPT} if request.args else {}
    for needs in (each for each, is_met in met.items() if not is_met):
        if names := [name for name, its_needs in given.items() if its_needs == needs]:
            it = "it" if len(names) == 1 else "them"
            raise UsageError(f"{' and '.join(names)}: {needs.value}; leave {it} out")
