"""The options of `up` and `plan` as invoke sees them: one signature, one request."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import invoke
from invoke import Context

from cluster.host.cli.command_line import report_errors
from cluster.host.launch import configuration
from cluster.host.options import run_file
from cluster.host.options.combinations import parse_options
from cluster.host.options.request import OPTIONS, Request
from cluster.system.errors import UsageError

FILE_HELP = "read options from this run file, see docs/reference/options.md; those given here win (default: none)"
UNTYPED: dict[tuple[type, ...], bool | None] = {(list,): None, (bool,): False}
"""The values by which invoke knows the type of an option that takes no word, or several."""
COMMANDS: set[str] = set()
"""The names of all commands, which no new run may have; `tasks.py` sets them."""


def takes_request(*left_out: str, **help_texts: str) -> Callable[[Callable[..., None]], Any]:
    """Decorator that turns a function `(c, request, ...)` into a task with the options of `Request` and its other ones.

    Args:
        left_out: the options of `Request` that it does not take, by the names of their fields.
        help_texts: the help of the options that are its own, by the names of their parameters.
    """
    taken = {name: each for name, each in OPTIONS.items() if name not in left_out}

    def decorate(body: Callable[..., None]) -> Any:
        context, _, *own = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def wrapped(c: Context, file: str = "", **given: Any) -> None:
            ours = {parameter.name: given.pop(parameter.name, parameter.default) for parameter in own}
            given = parse_options(given)
            words = _words(c)
            settings = run_file.read(file, taken) if file else None
            request = settings.request(given, words) if settings else Request(**given, overrides=words)
            if request.name in COMMANDS:
                raise UsageError(f"--name {request.name} is also a command; choose another name")
            if request.asks_for_help:
                print(configuration.options(request))
            else:
                body(c, request, **ours)

        options = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=UNTYPED.get(each.types, "")) for each in taken.values()
        ]
        file = Parameter("file", Parameter.KEYWORD_ONLY, default="")
        extras = [file, *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in own)]
        wrapped.__signature__ = inspect.Signature([context, *options, *extras])  # type: ignore[attr-defined]
        return invoke.task(
            auto_shortflags=False,
            iterable=[each.name for each in taken.values() if each.types == (list,)],
            help={name: each.full_help for name, each in taken.items()} | {"file": FILE_HELP} | help_texts,
        )(report_errors(wrapped))

    return decorate


def _words(c: Context) -> tuple[str, ...]:
    """Return the words after `--`."""
    typed = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    # invoke joins the words and loses their quotes.
    return tuple(typed if " ".join(typed) == c.remainder else shlex.split(c.remainder))
