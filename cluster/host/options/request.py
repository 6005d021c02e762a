"""The options of `up` and `plan`: each is declared once, as a field of `Request`.

invoke's signature, `--help`, run files (`run_file.py`) and docs/reference/options.md follow from these declarations.
"""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from cluster.contract import strategies
from cluster.contract.recovery.attempt_limits import MAX_EXTERNAL_RESTARTS, MAX_RESTARTS
from cluster.contract.run.heartbeat import HANG_TIMEOUT_S
from cluster.contract.spec import DEFAULT_WORKERS, MAX_DEVICES, MAX_TASKS, parse_count
from cluster.host.runtime import registry, tensorboard
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import COMMAND
from cluster.system.paths import ROOT

TYPES = {int: "integer", str: "string", bool: "boolean", list: "array of strings"}
"""TOML's names of the types that an option may have."""


class Group(StrEnum):
    """The headings under which the help and the documentation list the options, in this order."""

    TRAINS = "What trains"
    RUNS = "Where it runs"
    KEPT = "How it is kept alive"
    WATCHED = "How it is watched"
    COMMAND = "This command alone"


class Needs(Enum):
    """What an option requires, and why."""

    TRAINER = "only for the built-in trainer, not with a script"
    SCRIPT = "only with --script, whose TF_CONFIG it changes"
    NEW_RUN = "only for a new run, and --resume names one that exists"
    EARLIER_RUN = "only with --resume, for a run that somebody else started"
    CONTAINERS = "only for containers (--runtime docker or swarm)"
    SHARED_IMPORT = "only for the built-in trainer as local processes without GPUs"
    QUEUE = "only where a scheduler places the tasks (--runtime slurm or swarm)"


@dataclass(frozen=True)
class Option:
    """The declaration of an option.

    Attributes:
        default: the default in words.
        types: the types that a run file may give it; a field with several is a string.
        choices: the only valid values; empty: any that pass the checks of the module that uses them.
        bounds: the smallest and the largest number, of an option that is a number or has one as its default.
        override: the field of the training configuration that it sets; empty for none.
        is_path: whether it names a file, which a run file names relative to itself.
    """

    help: str
    default: str
    types: tuple[type, ...]
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] = (0, 10**9)
    needs: Needs | None = None
    override: str = ""
    is_path: bool = False
    name: str = ""
    group: Group = Group.COMMAND

    @property
    def key(self) -> str:
        """The name on the command line and in a run file."""
        return self.name.replace("_", "-")

    @property
    def type(self) -> str:
        """The types of its values, in words."""
        return " or ".join(TYPES[kind] for kind in self.types)

    @property
    def full_help(self) -> str:
        return f"{self.help} (default: {self.default})"

    def is_given(self, value: Any) -> bool:
        return value is not None if self.types == (int,) else bool(value)


def _declare(help: str, default: object, empty: Any, types: tuple[type, ...], **more: Any) -> Any:  # noqa: A002
    return dataclasses.field(default=empty, metadata={"option": Option(help, str(default), types, **more)})


def number(help: str, default: object, **more: Any) -> Any:  # noqa: A002  # as invoke calls it
    """Declare an option that is a whole number; see `Option` for the arguments."""
    return _declare(help, default, None, (int,), **more)


def text(help: str, default: object, *, takes_number: bool = False, **more: Any) -> Any:  # noqa: A002
    """Declare an option that is a word, or a word or a number."""
    return _declare(help, default, "", (int, str) if takes_number else (str,), **more)


def texts(help: str, default: object, **more: Any) -> Any:  # noqa: A002
    """Declare an option that may be repeated."""
    return _declare(help, default, (), (list,), **more)


def switch(help: str, default: str = "no", **more: Any) -> Any:  # noqa: A002
    """Declare an option without a value."""
    return _declare(help, default, False, (bool,), **more)


PRESET, PRESETS = "fashion_mnist", ROOT / "train" / "presets"
LOOPS = ("custom", "fit")
SCHEDULES = ("gpipe", "1f1b", "pipedream")
MAX_PER_JOB = 4096
_ONE_OF_RUNTIMES = f"{', '.join([registry.AUTO, *list(registry.RUNTIMES)[:-1]])} or {list(registry.RUNTIMES)[-1]}"
_ONE_OF_STRATEGIES = ", ".join([strategies.AUTO, *list(strategies.STRATEGIES)[:-1]])


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What trains."""

    workers: int | None = number(
        "worker tasks in addition to the chief; 0: the chief alone",
        f"{DEFAULT_WORKERS}; 0 for a strategy of one process",
        bounds=(0, MAX_TASKS),
    )
    ps: int | None = number("parameter servers; 1 or more: ParameterServerStrategy", 0, bounds=(0, MAX_TASKS))
    evaluator: bool = switch("add a task that evaluates every new checkpoint", needs=Needs.TRAINER)
    strategy: str = text(f"{_ONE_OF_STRATEGIES} or {list(strategies.STRATEGIES)[-1]}", "auto, from the topology")
    devices: int | None = number(
        "replicas of the only task, on logical CPUs; with --gpus those of each task, its GPUs",
        1,
        bounds=(1, MAX_DEVICES),
    )
    preset: str = text(
        f"{', '.join(sorted(path.stem for path in PRESETS.glob('[a-z]*.py')))} or package.module:function",
        PRESET,
        needs=Needs.TRAINER,
    )
    loop: str = text("custom, or fit for Keras's own", LOOPS[0], choices=LOOPS, needs=Needs.TRAINER, override="loop")
    precision: str = text(
        "fp32, bf16 or fp16: what layers compute in; weights stay in float32",
        "fp32",
        needs=Needs.TRAINER,
        override="precision",
    )
    bitwise_elastic: int | None = number(
        "virtual shards V: any number of replicas up to V gives the same bits",
        "0, none",
        needs=Needs.TRAINER,
        override="bitwise-elastic",
    )
    stages: int | None = number(
        "with --strategy pipeline: stages, each a task; with --workers 0 each a device of the chief",
        "as many as tasks and devices",
        bounds=(1, MAX_TASKS),
        needs=Needs.TRAINER,
    )
    micro_batches: int | None = number(
        "parts of each replica's batch whose gradients are added up before an update, for less memory",
        1,
        needs=Needs.TRAINER,
        override="micro-batches",
    )
    schedule: str = text(
        "with --strategy pipeline: gpipe, 1f1b or pipedream",
        SCHEDULES[0],
        choices=SCHEDULES,
        needs=Needs.TRAINER,
        override="pipeline.schedule",
    )
    remat: bool = switch(
        "with --strategy pipeline: compute activations again for the backward instead of keeping them",
        needs=Needs.TRAINER,
        override="pipeline.remat",
    )
    cut: str = text(
        "with --strategy pipeline: the first layer of each stage but the first, such as dense,logits",
        "the best one",
        needs=Needs.TRAINER,
        override="pipeline.cut",
    )
    init_from: str = text(
        "begin with the weights of this run's newest checkpoint, or of a .weights.h5, .keras, .h5, .npz or .index file",
        "random ones",
        needs=Needs.NEW_RUN,
        override="init-from",
    )
    script: str = text(
        "run this script, which reads TF_CONFIG, in every task; its arguments follow --",
        "our trainer",
        needs=Needs.NEW_RUN,
        is_path=True,
    )
    separate_chief: bool = switch(
        "give the script's TF_CONFIG a chief, as with --ps", "no, it is worker 0", needs=Needs.SCRIPT
    )
    requirements: str = text("requirements file with packages for your own code", "none", is_path=True)
    env: Sequence[str] = texts(
        "variable for every task: NAME, with its value here, or NAME=VALUE; may be repeated", "none"
    )
    secret: Sequence[str] = texts(
        "NAME=FILE: variable for every task whose value is in this file, and nowhere else; may be repeated",
        "none",
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Where it runs."""

    runtime: str = text(_ONE_OF_RUNTIMES, "auto: containers where a Docker Engine answers")
    network: str = text(
        "private; or for local tasks host, the machine's; for containers egress, with a way out; in a Swarm encrypted",
        "private; host for local scripts and TPUs",
    )
    keep_warm: str = text(
        "a time such as 15m: for so long after a run a process that has imported TensorFlow stays for the next `up`",
        "that of your configuration, or 0, none stays",
        needs=Needs.SHARED_IMPORT,
    )
    memory: str = text(
        "memory limit of each container, such as 8GiB; a container that exceeds it is killed",
        "its share of the machine's memory",
        needs=Needs.CONTAINERS,
    )
    gpus: str = text(
        "none, all, how many, or ids such as 0,1: for the chief and the workers",
        "none, they see none",
        takes_number=True,
    )
    partition: str = text("Slurm partition, or several with commas", "the site's", needs=Needs.QUEUE)
    constraint: str = text(
        "nodes of a Swarm that take tasks, such as node.labels.gpu==true; several with commas", "all", needs=Needs.QUEUE
    )
    time: str = text(
        "time limit of the job, such as 90 or 2-12:00; at its end the run saves and is queued again",
        "the partition's",
        takes_number=True,
        needs=Needs.QUEUE,
    )
    account: str = text("Slurm account to charge", "yours", needs=Needs.QUEUE)
    nodes: int | None = number(
        "nodes that the job's tasks are spread over", "as Slurm places them", bounds=(1, MAX_PER_JOB), needs=Needs.QUEUE
    )
    cpus_per_task: int | None = number(
        "processors of each task", "the scheduler's", bounds=(1, MAX_PER_JOB), needs=Needs.QUEUE
    )
    gpus_per_task: int | None = number(
        "GPUs of the chief and of each worker", "none", bounds=(0, MAX_DEVICES), needs=Needs.QUEUE
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """How it is kept alive."""

    checkpoint_every: str = text(
        "optimizer steps such as 200, or seconds such as 30s, between two checkpoints",
        "auto",
        takes_number=True,
        needs=Needs.TRAINER,
        override="checkpoint-every",
    )
    check_replicas: str = text(
        "when the replicas' weights are compared, bit for bit: before a checkpoint, and every so many steps; 0: never",
        "auto, before every checkpoint",
        takes_number=True,
        needs=Needs.TRAINER,
        override="check-replicas",
    )
    no_memory_snapshots: bool = switch(
        "do not keep the newest state in memory, twice and at up to 2 % of the time, from which a restart continues",
        needs=Needs.TRAINER,
        override="no-memory-snapshots",
    )
    hang_timeout: int | None = number(
        "seconds without a new step after which every task starts again", f"{HANG_TIMEOUT_S:g}", bounds=(1, 86_400)
    )
    max_restarts: int | None = number(
        "restarts of a program that fails by itself and makes no progress", MAX_RESTARTS, bounds=(0, 1000)
    )
    max_external_restarts: int | None = number(
        "restarts in a row of what is killed from outside and makes no progress",
        MAX_EXTERNAL_RESTARTS,
        bounds=(0, 100_000),
    )
    min_workers: int | None = number(
        "workers that are enough: the run continues without those that stay away, at the same global batch",
        "all",
        bounds=(0, MAX_TASKS),
        needs=Needs.TRAINER,
    )
    grow: bool = switch(
        "with --min-workers: take in workers that return, at the next checkpoint",
        f"no, they wait for `{COMMAND} scale`",
        needs=Needs.TRAINER,
    )
    name: str = text("name of the run", "preset, date and time", needs=Needs.NEW_RUN)
    resume: str = text("resume this run, on its own topology unless another is given", "start a new run")
    trust: bool = switch(
        "take a run that this user did not start here, or that was changed since", needs=Needs.EARLIER_RUN
    )
    mirror: str = text(
        "s3://BUCKET/PATH, gs://BUCKET/PATH or file:///PATH: copy checkpoints and the export there, for a machine that "
        "has nothing of the run to --resume; none: no longer",
        "none; of a run that is resumed, its own",
        needs=Needs.TRAINER,
    )
    fresh: bool = switch("start a run of this --name again, its old folder is deleted", needs=Needs.NEW_RUN)


@dataclass(frozen=True, kw_only=True)
class MonitoringOptions:
    """How it is watched."""

    tensorboard_port: str = text(
        f"port of TensorBoard on 127.0.0.1, or auto: that of the running one, or {tensorboard.PORT}, or a free one; "
        "0: none",
        tensorboard.AUTO,
        takes_number=True,
        bounds=(0, 65535),
    )
    metrics_port: int | None = number("port of metrics for Prometheus on 127.0.0.1; 0: none", 0, bounds=(0, 65535))
    detach: bool = switch("return once every task is training", "stay until the end")
    tag: Sequence[str] = texts("a word for `runs --filter tag=WORD`; may be repeated", "none")
    note: str = text("a sentence about the run, which `runs` shows", "none")


@dataclass(frozen=True, kw_only=True)
class Request(MonitoringOptions, RecoveryOptions, PlacementOptions, TrainingOptions):
    """The request of a command; None, empty and False are the options that were left out."""

    again: str = ""
    """The run to repeat in a separate folder."""
    overrides: Sequence[str] = ()
    """The words after `--`: overrides of the training configuration, or a script's arguments."""
    train: Sequence[str] = ()
    """The training overrides of a run file."""
    args: Sequence[str] = ()
    """The script's arguments in a run file."""
    code_dir: str = ""
    """The folder of the run file, where the user's modules are found besides the current folder."""

    def is_given(self, name: str) -> bool:
        return OPTIONS[name].is_given(getattr(self, name))

    def training(self) -> list[str]:
        """Return the overrides of the training configuration, those that are options of `up` first."""
        words = []
        for option in OPTIONS.values():
            if option.override and self.is_given(option.name):
                words += [f"--{option.override}"]
                words += [] if option.types == (bool,) else [str(getattr(self, option.name))]
        return [*words, *self.train, *self.overrides]

    def count(self, name: str) -> int:
        """Return an option as a number, or its default; raise UsageError if it is out of its bounds."""
        option = OPTIONS[name]
        value = getattr(self, name) if self.is_given(name) else option.default
        return parse_count(option.key, value, *option.bounds)

    @property
    def board_port(self) -> int | None:
        """The port of TensorBoard; None: any, 0: no TensorBoard."""
        return None if self.tensorboard_port in ("", tensorboard.AUTO) else self.count("tensorboard_port")

    @property
    def arguments(self) -> Sequence[str]:
        """The script's arguments: those of the command line, or else of the run file."""
        return self.overrides or self.args

    def run_name(self) -> str:
        """Return the name of a run that was given none."""
        project = Path(self.code_dir).name  # empty without a run file
        origin = self.again or (Path(self.script).stem if self.script else self.preset or project or PRESET)
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", origin).strip("-._")[:40] or "run"
        return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"


GROUPS = {
    Group.TRAINS: TrainingOptions,
    Group.RUNS: PlacementOptions,
    Group.KEPT: RecoveryOptions,
    Group.WATCHED: MonitoringOptions,
}
OPTIONS: dict[str, Option] = {
    field.name: dataclasses.replace(field.metadata["option"], name=field.name, group=group)
    for group, options in GROUPS.items()
    for field in dataclasses.fields(options)
}


def check_together(request: Request, *, scripted: bool | None) -> None:
    """Check the values of a request's options, and that they go together.

    `scripted` says whether the tasks run a script; None: as in the earlier run that the request names.
    """
    for option in OPTIONS.values():
        value = getattr(request, option.name)
        if option.choices and value and value not in option.choices:
            raise UsageError(f"--{option.key} {value!r} is not a {option.name}{nearest(value, option.choices)}")
        if option.types == (int,) and value is not None:
            parse_count(option.key, value, *option.bounds)
    if scripted is False:
        both = {f"--{option.override}": option.key for option in OPTIONS.values() if option.override}
        for word in request.overrides:
            if key := both.get(word.partition("=")[0].replace("_", "-")):
                raise UsageError(f"{word} is an option of `up`; give --{key} before --")
    met = {Needs.NEW_RUN: not request.resume, Needs.EARLIER_RUN: bool(request.resume or request.again)}
    check_needs(request, met if scripted is None else met | {Needs.TRAINER: not scripted, Needs.SCRIPT: scripted})


def check_needs(request: Request, met: Mapping[Needs, bool]) -> None:
    """Check that no option was given whose needs are known not to be met; the error names all with the same needs."""
    given = {f"--{option.key}": option.needs for option in OPTIONS.values() if request.is_given(option.name)}
    given |= {"[train]": Needs.TRAINER} if request.train else {}
    given |= {"args": Needs.SCRIPT} if request.args else {}
    for needs in (need for need, is_met in met.items() if not is_met):
        if names := [name for name, its_needs in given.items() if its_needs == needs]:
            it = "it" if len(names) == 1 else "them"
            raise UsageError(f"{' and '.join(names)}: {needs.value}; leave {it} out")
