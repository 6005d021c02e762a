"""How an option of `up` is declared: once, as a field of `Request`.

Its flag, its help, its key in a run file and its row in docs/reference/options.md are made from that field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from cluster.system.errors import UsageError, nearest


class Group(StrEnum):
    """What an option is about; the help and the documentation list the options under these headings, in this order."""

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
    GPUS = "only with GPUs (--gpus all)"
    CONTAINERS = "only for containers (--runtime docker or swarm)"
    QUEUE = "only where a scheduler places the tasks (--runtime slurm or swarm)"


KINDS = {int: "integer", str: "string", bool: "boolean", list: "array of strings"}
"""TOML's names of the types that an option may have."""


@dataclass(frozen=True)
class Option:
    """An option of `up`.

    Attributes:
        name: of the field of `Request`.
        group: the heading that it is listed under.
        help: what it is, without its default.
        default: what holds where it is left out, in words.
        empty: the field's value where it is left out.
        kinds: the types that a run file may give it.
        choices: the only values it takes; empty: any that pass the checks of whoever uses them.
        bounds: the smallest and the largest number, of an option with a default that is a number.
        needs: what it can be combined with; None: anything.
        is_override: whether it is a field of the training configuration, too.
        is_path: whether it names a file, which a run file names relative to itself.
    """

    name: str
    group: Group
    help: str
    default: str
    empty: Any = ""
    kinds: tuple[type, ...] = (str,)
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] = (0, 0)
    needs: Needs | None = None
    is_override: bool = False
    is_path: bool = False

    @property
    def key(self) -> str:
        """The name on the command line and in a run file."""
        return self.name.replace("_", "-")

    @property
    def type(self) -> str:
        """The types of its values, in words."""
        return " or ".join(KINDS[kind] for kind in self.kinds)

    @property
    def full_help(self) -> str:
        """The help with the default."""
        return f"{self.help} (default: {self.default})"


def option(group: Group, help: str, default: object, **more: Any) -> Any:  # noqa: A002  # as invoke calls it
    """Return the field of `Request` that declares an option; see `Option` for the arguments."""
    return dataclasses.field(
        default=more.get("empty", ""), metadata={"option": Option("", group, help, str(default), **more)}
    )


def switch(group: Group, help: str, default: str = "no", **more: Any) -> Any:  # noqa: A002
    """Return the field of `Request` that declares an option without a value."""
    return option(group, help, default, empty=False, kinds=(bool,), **more)


def declared(request: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by the names of their fields."""
    return {
        field.name: dataclasses.replace(field.metadata["option"], name=field.name)
        for field in dataclasses.fields(request)
        if "option" in field.metadata
    }


def check_choices(options: Sequence[Option], values: Mapping[str, Any]) -> None:
    """Check the values of options that take only certain ones.

    Raises:
        UsageError: one has another value; the nearest is offered.
    """
    for each in options:
        value = values[each.name]
        if each.choices and value and value not in each.choices:
            raise UsageError(f"--{each.key} {value!r} is not a {each.name}{nearest(value, each.choices)}")
