"""The options of `up` and `plan`: each is declared once, as a field of `Request`; `request.toml` has its help.

The signatures for invoke, `--help`, run files (`run_file.py`) and docs/reference/options.md are derived from these
declarations.
"""

import dataclasses
import re
import time
import tomllib
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
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND, either

TYPES = {int: "integer", str: "string", bool: "boolean", list: "array of strings"}
_TYPES: dict[Any, tuple[type, ...]] = {int | None: (int,), str: (str,), bool: (bool,), Sequence[str]: (list,)}
"""The types of an option, by the annotation of its field."""
WORD_OR_NUMBER = (int, str)
PRESET, PRESETS = "fashion_mnist", ROOT / "train" / "presets"
MAX_PER_JOB = 4096
WEIGHT_SUFFIXES = (".index", ".npz", ".h5", ".keras")
"""The suffixes of weight files that `train/model/initial_weights.py` can read."""


class Group(StrEnum):
    """The headings of the options in the help and the documentation, in this order."""

    TRAINS = "What trains"
    RUNS = "Where it runs"
    KEPT = "How it is kept alive"
    WATCHED = "How it is watched"
    COMMAND = "Only this command"


class Needs(Enum):
    """A condition of an option, with its wording in errors."""

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
        types: its types in a run file, by default that of its field; with several types the field is a string.
        choices: the only valid values; empty if the module that uses the option checks them.
        bounds: the smallest and the largest value of a number.
        override: the field of the training configuration that it sets; empty for none.
        is_path: whether it is a path, which is relative to the run file in a run file.
        suffixes: the suffixes of its files, if it may also be a run; any other value with a `/` is then a path, too.
    """

    name: str
    group: Group
    help: str
    default: str
    types: tuple[type, ...]
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] = (0, 10**9)
    needs: Needs | None = None
    override: str = ""
    is_path: bool = False
    suffixes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name on the command line and in a run file."""
        return self.name.replace("_", "-")

    @property
    def type(self) -> str:
        """The types of its values, in words."""
        return " or ".join(TYPES[kind] for kind in self.types)

    def parse(self, word: Any) -> Any:
        """Return the value of a word; for a number, raise UsageError if it is invalid or out of bounds."""
        return parse_count(self.key, word, *self.bounds) if self.types == (int,) else word

    def names_path(self, value: str) -> bool:
        """Whether a value is a path, and not the name of a run or anything else."""
        return self.is_path and (not self.suffixes or "/" in value or value.endswith(self.suffixes))

    def is_given(self, value: Any) -> bool:
        return value is not None if self.types == (int,) else bool(value)


def option(empty: Any = "", **more: Any) -> Any:
    """Declare an option with the value that it has if left out, and further arguments of `Option`."""
    return dataclasses.field(default=empty, metadata=more)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of a command: the options in the order of `request.toml`, which has their groups, then other fields.

    Options that were left out are None, empty or False.
    """

    workers: int | None = option(None, bounds=(0, MAX_TASKS))
    ps: int | None = option(None, bounds=(0, MAX_TASKS))
    evaluator: bool = option(False, needs=Needs.TRAINER)
    strategy: str = ""
    devices: int | None = option(None, bounds=(1, MAX_DEVICES))
    preset: str = option(needs=Needs.TRAINER)
    loop: str = option(choices=("custom", "fit"), needs=Needs.TRAINER, override="loop")
    precision: str = option(needs=Needs.TRAINER, override="precision")
    bitwise_elastic: int | None = option(None, needs=Needs.TRAINER, override="bitwise-elastic")
    stages: int | None = option(None, bounds=(1, MAX_TASKS), needs=Needs.TRAINER)
    micro_batches: int | None = option(None, needs=Needs.TRAINER, override="micro-batches")
    schedule: str = option(choices=("gpipe", "1f1b", "pipedream"), needs=Needs.TRAINER, override="pipeline.schedule")
    remat: bool = option(False, needs=Needs.TRAINER, override="pipeline.remat")
    cut: str = option(needs=Needs.TRAINER, override="pipeline.cut")
    init_from: str = option(needs=Needs.NEW_RUN, override="init-from", is_path=True, suffixes=WEIGHT_SUFFIXES)
    reuse_data: bool = option(False, needs=Needs.TRAINER)
    script: str = option(needs=Needs.NEW_RUN, is_path=True)
    separate_chief: bool = option(False, needs=Needs.SCRIPT)
    requirements: str = option(is_path=True)
    env: Sequence[str] = ()
    secret: Sequence[str] = option((), is_path=True)

    runtime: str = ""
    network: str = ""
    keep_warm: str = option(needs=Needs.SHARED_IMPORT)
    memory: str = option(needs=Needs.CONTAINERS)
    gpus: str = option(types=WORD_OR_NUMBER)
    partition: str = option(needs=Needs.QUEUE)
    constraint: str = option(needs=Needs.QUEUE)
    time: str = option(types=WORD_OR_NUMBER, needs=Needs.QUEUE)
    account: str = option(needs=Needs.QUEUE)
    nodes: int | None = option(None, bounds=(1, MAX_PER_JOB), needs=Needs.QUEUE)
    cpus_per_task: int | None = option(None, bounds=(1, MAX_PER_JOB), needs=Needs.QUEUE)
    gpus_per_task: int | None = option(None, bounds=(0, MAX_DEVICES), needs=Needs.QUEUE)

    checkpoint_every: str = option(types=WORD_OR_NUMBER, needs=Needs.TRAINER, override="checkpoint-every")
    check_replicas: str = option(types=WORD_OR_NUMBER, needs=Needs.TRAINER, override="check-replicas")
    no_memory_snapshots: bool = option(False, needs=Needs.TRAINER, override="no-memory-snapshots")
    hang_timeout: int | None = option(None, bounds=(1, 86_400), needs=Needs.TRAINER)
    max_restarts: int | None = option(None, bounds=(0, 1000))
    max_external_restarts: int | None = option(None, bounds=(0, 100_000))
    min_workers: int | None = option(None, bounds=(0, MAX_TASKS), needs=Needs.TRAINER)
    grow: bool = option(False, needs=Needs.TRAINER)
    name: str = option(needs=Needs.NEW_RUN)
    resume: str = ""
    trust: bool = option(False, needs=Needs.EARLIER_RUN)
    mirror: str = option(needs=Needs.TRAINER)
    fresh: bool = option(False, needs=Needs.NEW_RUN)

    tensorboard_port: str = option(types=WORD_OR_NUMBER, bounds=(0, 65535))
    metrics_port: int | None = option(None, bounds=(0, 65535))
    detach: bool = False
    tag: Sequence[str] = ()
    note: str = ""

    again: str = ""
    """The run to repeat in a separate folder."""
    overrides: Sequence[str] = ()
    """The words after `--`: overrides of the training configuration, or a script's arguments."""
    train: Sequence[str] = ()
    """The training overrides of a run file."""
    args: Sequence[str] = ()
    """The script's arguments in a run file."""
    code_dir: str = ""
    """The folder of the run file, which is searched for the user's modules in addition to the current folder."""

    def is_given(self, name: str) -> bool:
        return OPTIONS[name].is_given(getattr(self, name))

    def training(self) -> list[str]:
        """Return the overrides of the training configuration, those of a run file first: the last one counts."""
        words = []
        for option in OPTIONS.values():
            if option.override and self.is_given(option.name):
                words += [f"--{option.override}"]
                words += [] if option.types == (bool,) else [str(getattr(self, option.name))]
        return [*self.train, *words, *self.overrides]

    def count(self, name: str) -> int:
        """Return an option as a number, or its default; raise UsageError if it is out of its bounds."""
        option = OPTIONS[name]
        value = getattr(self, name) if self.is_given(name) else option.default
        return parse_count(option.key, value, *option.bounds)

    @property
    def board_port(self) -> int | None:
        """The port of TensorBoard; None for any, 0 for no TensorBoard."""
        return None if self.tensorboard_port in ("", tensorboard.AUTO) else self.count("tensorboard_port")

    @property
    def arguments(self) -> Sequence[str]:
        """The script's arguments, from the command line or else from the run file."""
        return self.overrides or self.args

    def run_name(self) -> str:
        """Return the default name of the run."""
        project = Path(self.code_dir).name  # empty without a run file
        origin = self.again or (Path(self.script).stem if self.script else self.preset or project or PRESET)
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", origin).strip("-._")[:40] or "run"
        return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"


_VALUES = {
    "command": COMMAND,
    "hang_timeout": f"{HANG_TIMEOUT_S:g}",
    "max_external_restarts": MAX_EXTERNAL_RESTARTS,
    "max_restarts": MAX_RESTARTS,
    "port": tensorboard.PORT,
    "preset": PRESET,
    "presets": ", ".join(sorted(path.stem for path in PRESETS.glob("[a-z]*.py"))),
    "runtimes": either([registry.AUTO, *registry.RUNTIMES]),
    "strategies": either([strategies.AUTO, *strategies.STRATEGIES]),
    "workers": DEFAULT_WORKERS,
}
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _option(field: dataclasses.Field[Any], group: str, texts: Mapping[str, str]) -> Option:
    words: dict[str, Any] = {key: template.format(**_VALUES) for key, template in texts.items()}
    kind = {"name": field.name, "group": Group[group], "types": _TYPES[field.type]}
    return Option(**kind | words | field.metadata)


_FIELDS = {field.name: field for field in dataclasses.fields(Request)}
OPTIONS = {
    name: _option(_FIELDS[name], group, texts) for group, named in _TEXTS.items() for name, texts in named.items()
}
OVERRIDES = {f"--{option.override}": option for option in OPTIONS.values() if option.override}
"""The options that set a field of the training configuration, by their word after `--`."""


def check_together(request: Request, *, scripted: bool | None) -> None:
    """Check the values of a request's options, and that they are compatible; raise UsageError if not.

    `scripted`: whether the tasks run a script; None if this depends on the earlier run that the request names.
    """
    for option in OPTIONS.values():
        value = getattr(request, option.name)
        if option.choices and value and value not in option.choices:
            raise UsageError(f"--{option.key} {value!r} is not a {option.name}{nearest(value, option.choices)}")
        if value is not None:
            option.parse(value)
    if scripted is False:
        for word in request.overrides:
            if same := OVERRIDES.get(word.partition("=")[0].replace("_", "-")):
                raise UsageError(f"{word} is an option of `up`; give --{same.key} before --")
    met = {Needs.NEW_RUN: not request.resume, Needs.EARLIER_RUN: bool(request.resume or request.again)}
    check_needs(request, met if scripted is None else met | {Needs.TRAINER: not scripted, Needs.SCRIPT: scripted})


def check_needs(request: Request, met: Mapping[Needs, bool]) -> None:
    """Raise UsageError if the request has options whose condition is known to be unmet; the error lists them."""
    given = {f"--{option.key}": option.needs for option in OPTIONS.values() if request.is_given(option.name)}
    given |= {"[train]": Needs.TRAINER} if request.train else {}
    given |= {"args": Needs.SCRIPT} if request.args else {}
    for needs in (need for need, is_met in met.items() if not is_met):
        if names := [name for name, its_needs in given.items() if its_needs == needs]:
            it = "it" if len(names) == 1 else "them"
            raise UsageError(f"{' and '.join(names)}: {needs.value}; leave {it} out")
