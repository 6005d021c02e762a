"""The declaration of an option: what it is, which values it takes, and what it goes with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

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
    QUEUE = "only where a scheduler places the tasks (--runtime slurm or swarm)"


@dataclass(frozen=True)
class Option:
    """The declaration of an option.

    Attributes:
        help: its description, without the default.
        default: the default in words.
        types: the types that a run file may give it; a field with several is a string.
        choices: the only valid values; empty: any that pass the checks of the module that uses them.
        bounds: the smallest and the largest number, of an option that is a number or has one as its default.
        needs: what it can be combined with; None: anything.
        override: the field of the training configuration that it sets; empty for none.
        is_path: whether it names a file, which a run file names relative to itself.
        name: of the field of `Request`.
        group: the heading that it is listed under.
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
        """The help with the default."""
        return f"{self.help} (default: {self.default})"

    def is_given(self, value: Any) -> bool:
        """Return whether a value of the field is not that of an option which was left out."""
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
