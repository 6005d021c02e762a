"""The options of `up` and `plan` as invoke sees them: one signature, one grouped help, one request."""

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
from invoke.parser import ParserContext
from invoke.parser.context import to_flag

from cluster.host.cli.command_line import report_errors
from cluster.host.launch import configuration
from cluster.host.options import run_file
from cluster.host.options.option import Group
from cluster.host.options.request import OPTIONS, Request
from cluster.system.errors import UsageError

FILE_HELP = "read options from this run file, see docs/reference/options.md; those given here win (default: none)"
COMMANDS: set[str] = set()
"""The names of all commands, which no new run may have; `tasks.py` sets them."""
_GROUPED: set[str] = set()
"""The tasks whose help lists the options in groups."""

_help_tuples = ParserContext.help_tuples


def takes_request(*left_out: str, **help_texts: str) -> Callable[[Callable[..., None]], Any]:
    """Return what makes a task of a function `(c, request, ...)`: it takes the options of `Request`, and its own.

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
            given = {name: value for name, value in given.items() if value}
            words = _words(c)
            settings = run_file.read(file).only(taken) if file else None
            request = settings.request(given, words) if settings else Request(**given, overrides=words)
            try:
                if request.name in COMMANDS:
                    raise UsageError(f"--name {request.name} is also a command; choose another name")
                if request.asks_for_help:
                    print(configuration.options(request))
                else:
                    body(c, request, **ours)
            except UsageError as error:
                if settings is None:
                    raise
                raise settings.located(error, given, words) from None

        options = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=None if each.kinds == (list,) else each.empty)
            for each in taken.values()
        ]
        file = Parameter("file", Parameter.KEYWORD_ONLY, default="")
        extras = [file, *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in own)]
        wrapped.__signature__ = inspect.Signature([context, *options, *extras])  # type: ignore[attr-defined]
        _GROUPED.add(body.__name__)
        return invoke.task(
            auto_shortflags=False,
            iterable=[each.name for each in taken.values() if each.kinds == (list,)],
            help={name: each.full_help for name, each in taken.items()} | {"file": FILE_HELP} | help_texts,
        )(report_errors(wrapped))

    return decorate


def _words(c: Context) -> tuple[str, ...]:
    """Return the words after `--`."""
    typed = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    # invoke joins the words and loses their quotes.
    return tuple(typed if " ".join(typed) == c.remainder else shlex.split(c.remainder))


def _grouped_help(context: ParserContext) -> list[tuple[str, str | None]]:
    """Return the flags of a task and their help, under headings where the task takes a request."""
    if (context.name or "").rpartition(".")[2] not in _GROUPED:
        return list(_help_tuples(context))
    options = [option for option in OPTIONS.values() if option.key in context.args]
    names = {group: [option.key for option in options if option.group == group] for group in Group}
    names[Group.COMMAND] = [name for name in context.args if not any(name in each for each in names.values())]
    lines: list[tuple[str, str | None]] = []
    for group, members in names.items():
        lines += [*([("", None)] if lines else []), (f"{group}:", None)]
        lines += [context.help_for(to_flag(name)) for name in members]
    return lines


ParserContext.help_tuples = _grouped_help
