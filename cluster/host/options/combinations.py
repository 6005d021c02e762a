"""Checks of the options of `up` and `plan`: their numbers, their values, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.contract.spec import parse_count
from cluster.host.options.request import OPTIONS, Needs, Request
from cluster.system.errors import UsageError, nearest


def parse_options(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request for options as they were typed, without those that were left out.

    Raises:
        UsageError: a number is not one.
    """
    return {
        name: parse_count(OPTIONS[name].key, value, *OPTIONS[name].bounds) if OPTIONS[name].types == (int,) else value
        for name, value in words.items()
        if value
    }


def check_together(request: Request, *, scripted: bool | None) -> None:
    """Check the values of a request's options, and that they go together.

    Args:
        request: the request.
        scripted: whether the tasks run a script; None: as in the earlier run that it names.

    Raises:
        UsageError: a value is not valid, or an option does not go with the others.
    """
    for each in OPTIONS.values():
        value = getattr(request, each.name)
        if each.choices and value and value not in each.choices:
            raise UsageError(f"--{each.key} {value!r} is not a {each.name}{nearest(value, each.choices)}")
        if each.types == (int,) and value is not None:
            parse_count(each.key, value, *each.bounds)
    met = {Needs.NEW_RUN: not request.resume, Needs.EARLIER_RUN: bool(request.resume or request.again)}
    check_needs(request, met if scripted is None else met | {Needs.TRAINER: not scripted, Needs.SCRIPT: scripted})


def check_needs(request: Request, met: Mapping[Needs, bool]) -> None:
    """Check that no option was given whose needs are known not to be met.

    Raises:
        UsageError: one was; the message names all with the same needs.
    """
    given = {f"--{each.key}": each.needs for each in OPTIONS.values() if request.is_given(each.name)}
    given |= {"[train]": Needs.TRAINER} if request.train else {}
    given |= {"args": Needs.SCRIPT} if request.args else {}
    for needs in (each for each, is_met in met.items() if not is_met):
        if names := [name for name, its_needs in given.items() if its_needs == needs]:
            it = "it" if len(names) == 1 else "them"
            raise UsageError(f"{' and '.join(names)}: {needs.value}; leave {it} out")
