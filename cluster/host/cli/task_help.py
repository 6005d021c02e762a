"""The help of a task: how it is called, what it does, its options."""

from __future__ import annotations

import inspect
import shutil
import textwrap

from invoke import Exit, Program
from invoke.parser import ParserContext

from cluster.host.cli import caller
from cluster.system.errors import EXIT_UNREAD

MUST_BE_NAMED = "must be named"
"""What the help of a positional argument says that has no default."""

_help_for = ParserContext.help_for
_parse_cleanup = Program.parse_cleanup


def install() -> None:
    """Have invoke show help so."""
    Program.print_task_help = _print
    Program.parse_cleanup = _print_what_is_asked_for
    ParserContext.help_for = _always_with_value


def usage(context: ParserContext) -> str:
    """Return how a task is called, in one line."""
    words = []
    for argument in context.positional_args:
        name = argument.name.upper()
        words.append(name if MUST_BE_NAMED in (argument.help or "") else f"[{name}]")
    overrides = ["[-- OVERRIDES]"] if "--preset" in context.flags else []
    return " ".join(["invoke", context.name, *words, "[OPTIONS]", *overrides])


def _print_what_is_asked_for(program: Program) -> None:
    """Print the help or the list of tasks if either is requested, and end like any program if nobody reads it."""
    ended: Exit | None = None
    try:
        _parse_cleanup(program)
    except Exit as error:
        ended = error
    except BrokenPipeError:
        ended = Exit(code=EXIT_UNREAD)
    if ended:
        raise Exit(code=EXIT_UNREAD) if caller.has_closed_output() else ended


def _print(program: Program, name: str) -> None:
    context = program.parser.contexts[name]
    width = min(shutil.get_terminal_size().columns, 120)
    purpose = textwrap.fill(inspect.getdoc(program.collection[name]) or "", width)
    print(f"{usage(context)}\n\n{purpose}\n")
    if options := context.help_tuples():
        print("Options:")
        program.print_columns(options)


def _always_with_value(context: ParserContext, flag: str) -> tuple[str, str]:
    """Return an option and its help. Those that may be given without their names take a value all the same."""
    shown, text = _help_for(context, flag)
    return shown.replace("[=STRING]", "=STRING"), text
