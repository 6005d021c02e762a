"""How invoke reads the command line here: positional arguments may be left out, and a typo is refused as elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from invoke.exceptions import Exit, ParseError
from invoke.parser import ParserContext
from invoke.parser.parser import ParseMachine

from cluster.system.errors import EXIT_USAGE
from cluster.system.messages import plain
from cluster.system.terminal import error_text

_HELP = ("--help", "-h")
_UNKNOWN = "No idea what"
"""How invoke's own message about a word begins that is neither an option nor a task."""
_LIKENESS = 0.7
"""How much of a word must be there for another one to have been meant; `--epochs` is not `--ps`."""
_handle, _complete_context = ParseMachine.handle, ParseMachine.complete_context
_complete_flag, _check_ambiguity = ParseMachine.complete_flag, ParseMachine.check_ambiguity
_switch_to_context = ParseMachine.switch_to_context


class Misuse(ParseError, Exit):  # type: ignore[misc]  # invoke has no types
    """What was typed is no command. Completion expects a `ParseError`, and an `Exit` has a code."""

    def __init__(self, message: str, context: ParserContext | None) -> None:
        ParseError.__init__(self, message, context)
        self.text = message
        self.message, self._code = None, EXIT_USAGE  # invoke prints every `ParseError`

    def __str__(self) -> str:
        return error_text(f"error: {plain(self.text)}")


def install() -> None:
    """Have invoke read command lines so."""
    ParseMachine.handle, ParseMachine.complete_context = _handle_leniently, _complete_leniently
    ParseMachine.check_ambiguity = _check_ambiguity_of_core_options
    ParseMachine.switch_to_context = _switch_to_only_context
    ParseMachine.complete_flag, ParseMachine.error = _complete_flag_strictly, _refuse


def _leave_out(machine: ParseMachine) -> None:
    """Leave out the positional arguments that may be: invoke requires each, but `logs` makes sense without a task."""
    for argument in machine.context.positional_args if machine.context else ():
        if argument.optional and argument.value is None:
            argument.set_value("")


def _complete_leniently(machine: ParseMachine) -> None:
    _leave_out(machine)
    _complete_context(machine)


def _handle_leniently(machine: ParseMachine, token: str) -> None:
    if token in _HELP:
        _leave_out(machine)
    elif token[:1] == "-" != token and not machine.waiting_for_flag_value and not _is_option(machine, token):
        _leave_out(machine)  # a misspelt option is no positional argument
    try:
        _handle(machine, token)
    except Misuse as error:
        if not error.text.startswith(_UNKNOWN):
            raise
        raise Misuse(_unknown(machine, token), machine.context) from None


def _switch_to_only_context(machine: ParseMachine, name: str) -> None:
    """Refuse a second command: a word too many would run as one, whatever it deletes."""
    if task := machine.context.name:
        raise Misuse(f"{name!r} after `{task}` is a command of its own; give one command on a line", machine.context)
    _switch_to_context(machine, name)


def _complete_flag_strictly(machine: ParseMachine) -> None:
    """Refuse an option without its value: that of a positional argument would pass for a switch."""
    flag = machine.flag
    if flag and flag.takes_value and flag.optional and flag.raw_value is None and machine.context.name:
        machine.error("no value")
    _complete_flag(machine)


def _check_ambiguity_of_core_options(machine: ParseMachine, value: str) -> None:
    """Take the value of an option that may be given as a positional argument as well, as in `stop --run RUN`."""
    if not machine.context.name:
        _check_ambiguity(machine, value)


def _is_option(machine: ParseMachine, token: str) -> bool:
    context = machine.context
    return bool(context) and (token in context.flags or token in context.inverse_flags)


def _refuse(machine: ParseMachine, message: str) -> None:
    if machine.flag and not message.startswith(_UNKNOWN):
        takes = "its value is missing" if machine.flag.takes_value else "it takes no value"
        message = (
            f"--{machine.flag.name}: {takes}; `invoke --help {machine.context.name or ''}".rstrip() + "` describes it"
        )
    raise Misuse(message, machine.context)


def _unknown(machine: ParseMachine, word: str) -> str:
    """Return what is wrong with a word that is neither an option nor a task, and what may have been meant."""
    task = machine.context.name if machine.context else None
    if not word.startswith("-"):
        what = f"{word!r} is neither a task nor an argument of `{task}`" if task else f"{word!r} is not a task"
        advice = f"`invoke --help {task}` shows what it takes" if task else "`invoke --list` names all tasks"
        return f"{what}{_meant(word, machine.contexts) or f'; {advice}'}"
    known = machine.context.flags if task else machine.initial.flags
    advice = f"`invoke --help {task}` lists them" if task else "`invoke --help` lists them"
    if "--preset" in known:
        advice = f"training options follow --, such as: invoke {task} -- --epochs 1"
    return f"{word} is not an option of `{task or 'invoke'}`{_meant(word, known) or f'; {advice}'}"


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=_LIKENESS)
    return f"; did you mean {close[0]}?" if close else ""
