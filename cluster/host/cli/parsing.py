"""Changes to invoke's parsing, completion and help.

Positional arguments may be left out, typos get suggestions, and help begins with the commands and options in daily use.
invoke has no setting for these, and a task file cannot replace the program that loads it, so this module replaces some
of invoke's public methods.

invoke completes the names of tasks and options; this module completes values: runs, tasks, faults, presets and training
options. invoke's completion scripts omit an empty last word, and the shell keeps only candidates that begin with the
last word.
"""

import contextlib
import difflib
import inspect
import os
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from invoke import Collection, Exit, Program
from invoke.exceptions import ParseError
from invoke.parser import ParserContext
from invoke.parser.parser import ParseMachine

from cluster.contract import strategies
from cluster.host.control import chaos
from cluster.host.launch import configuration, folders
from cluster.host.options.request import OPTIONS, PRESETS, Group, Request
from cluster.host.options.run_file import dashed, flatten
from cluster.host.runtime import registry
from cluster.system.errors import EXIT_UNREAD, EXIT_USAGE, ClusterError
from cluster.system.messages import COMMAND, plain
from cluster.system.terminal import error_text

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
DAILY: list[str] = _WORDS["commands"]
DAILY_OPTIONS: list[str] = _WORDS["options"]
HELP, HELP_ALL = ("--help", "-h"), "--help-all"  # of a command, all options; of the program, all commands
VALUES = {name: "N" for name, option in OPTIONS.items() if option.types == (int,)}
"""The placeholder of an option's value in help, by default the option's name in capitals."""
VALUES |= {name: value for value, names in _WORDS["values"].items() for name in names}
MUST_BE_NAMED = "must be named"
"""The mark in the help of a positional argument that must not be left out."""
OF_EVERY_TASK = ("--help", "-h", "--dry", "-R")
"""The invoke options that may follow a task; others, such as --debug, have no effect on one."""
_UNKNOWN = "No idea what"
"""The beginning of invoke's message about a word that is neither an option nor a task."""
_LIKENESS = 0.7
"""The minimum similarity for a suggestion, too high for `--ps` as a suggestion for `--epochs`."""
_handle, _complete_context = ParseMachine.handle, ParseMachine.complete_context
_switch_to_context, _parse_cleanup = ParseMachine.switch_to_context, Program.parse_cleanup
_print_help, _display = Program.print_help, Program.display_with_columns


class _Shown:
    """The extent of the requested help."""

    everything = False
    other_commands = True


class Misuse(ParseError, Exit):  # type: ignore[misc]  # invoke has no types
    """An invalid command line. Completion expects a `ParseError`, and an `Exit` has a code."""

    def __init__(self, message: str, context: ParserContext | None) -> None:
        Exit.__init__(self, code=EXIT_USAGE)  # without a message: invoke prints every `ParseError`
        self.text, self.context = message, context

    def __str__(self) -> str:
        return error_text(f"error: {plain(self.text)}")


def install() -> None:
    """Replace the methods of invoke that read the command line and print help."""
    ParseMachine.handle, ParseMachine.complete_context = _handle_leniently, _complete_leniently
    ParseMachine.switch_to_context, ParseMachine.error = _switch_to_only_context, _refuse
    Program.print_task_help, Program.parse_cleanup = _print_task_help, _print_help_or_list
    Program.print_help, Program.display_with_columns = _print_commands, _list_commands


def has_closed_output() -> bool:
    """Return whether the reader has closed the output; then discard the rest, so that Python's final flush succeeds."""
    closed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return closed


def _leave_out(machine: ParseMachine) -> None:
    """Give missing positional arguments an empty value: invoke requires them, but `logs`, for one, works without."""
    for argument in machine.context.missing_positional_args if machine.context else ():
        argument.set_value("")


def _complete_leniently(machine: ParseMachine) -> None:
    _leave_out(machine)
    _complete_context(machine)


def _handle_leniently(machine: ParseMachine, token: str) -> None:
    if token == HELP_ALL and machine.current_state != "unknown":  # what is unknown is read again with the tasks
        _leave_out(machine)
        _Shown.everything = True
        machine.initial.flags[HELP[0]].set_value(machine.context.name or True, cast=False)
        return
    asks_for_help = token in HELP
    context = machine.context
    is_option = context and (token in context.flags or token in context.inverse_flags)
    is_misspelt = token[:1] == "-" != token and not machine.waiting_for_flag_value and not is_option
    if is_misspelt and token in machine.initial.flags and token not in OF_EVERY_TASK:
        raise Misuse(_unknown(machine, token), machine.context)
    if asks_for_help or is_misspelt:
        _leave_out(machine)  # the token is not a positional argument
    try:
        _handle(machine, token)
    except Misuse as error:
        if not error.text.startswith(_UNKNOWN):
            raise
        raise Misuse(_unknown(machine, token), machine.context) from None


def _switch_to_only_context(machine: ParseMachine, name: str) -> None:
    """Refuse a second command: an extra word could otherwise run one that deletes files."""
    if task := machine.context.name:
        raise Misuse(f"{name!r} after `{task}` is a separate command; give one command on a line", machine.context)
    if _Shown.everything:
        machine.initial.flags[HELP[0]].value = name
    _switch_to_context(machine, name)


def _refuse(machine: ParseMachine, message: str) -> None:
    if machine.flag and not message.startswith(_UNKNOWN):
        takes = "its value is missing" if machine.flag.takes_value else "it takes no value"
        task = machine.context.name or ""
        message = f"--{machine.flag.name}: {takes}; `{f'{COMMAND} --help {task}'.strip()}` describes it"
    raise Misuse(message, machine.context)


def _unknown(machine: ParseMachine, word: str) -> str:
    task = machine.context.name if machine.context else None
    if not word.startswith("-"):
        what = f"{word!r} is neither a task nor an argument of `{task}`" if task else f"{word!r} is not a task"
        advice = f"`{COMMAND} --help {task}` shows what it takes" if task else f"`{COMMAND} --list` names all tasks"
        return f"{what}{_meant(word, machine.contexts) or f'; {advice}'}"
    known = machine.context.flags if task else machine.initial.flags
    advice = f"`{COMMAND} --help {task}` lists them" if task else f"`{COMMAND} --help` lists them"
    if "--preset" in known:
        advice = f"training options follow --, such as: {COMMAND} {task} -- --epochs 1"
    return f"{word} is not an option of `{task or COMMAND}`{_meant(word, known) or f'; {advice}'}"


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=_LIKENESS)
    return f"; did you mean {close[0]}?" if close else ""


def _print_help_or_list(program: Program) -> None:
    """Print the help or the list of tasks if requested; exit quietly if the reader closes the pipe."""
    ended: Exit | None = None
    try:
        if program.args.complete.value:
            if found := find_candidates(program.collection, program.parser.contexts, program.core.remainder):
                print("\n".join(found))
                raise Exit
            with contextlib.suppress(ValueError):  # an open quote
                _parse_cleanup(program)
            raise Exit
        _parse_cleanup(program)
    except Exit as error:
        ended = error
    except BrokenPipeError:
        ended = Exit(code=EXIT_UNREAD)
    if ended:
        raise Exit(code=EXIT_UNREAD) if has_closed_output() else ended


def _print_task_help(program: Program, name: str) -> None:
    context = program.parser.contexts[name]
    takes_request = "--preset" in context.flags
    words = []
    for argument in context.positional_args:
        words.append(argument.name.upper() if MUST_BE_NAMED in (argument.help or "") else f"[{argument.name.upper()}]")
    print(" ".join([COMMAND, context.name, *words, "[OPTIONS]", *(["[-- OVERRIDES]"] if takes_request else [])]))
    width = min(shutil.get_terminal_size().columns, 120)
    print(f"\n{textwrap.fill(inspect.getdoc(program.collection[name]) or '', width)}\n")
    grouped = takes_request and _Shown.everything
    names = list(context.args)
    if takes_request:
        names = [*(name for name in DAILY_OPTIONS if name in names), *filter(_is_of_command, names)]
    if options := _grouped_help(context) if grouped else [_describe(context, name) for name in names]:
        print("Options:")
        program.print_columns(options)
    if takes_request and not grouped:
        print(f"All {len(context.args)} options, by topic: {COMMAND} {name} {HELP_ALL}")
        print(f"Options of training, such as --epochs, follow --: {COMMAND} {name} -- --help")


def _print_commands(program: Program) -> None:
    """Print the help of the program: its commands in daily use, or everything after `--help-all`."""
    if program.namespace is None or _Shown.everything:
        _print_help(program)
        if program.namespace is None:
            program.list_tasks()
        return
    print(f"Usage: {program.binary} COMMAND [OPTIONS]\n")
    _Shown.other_commands = False
    program.list_tasks()
    print(f"All commands: {program.binary} {HELP_ALL}. The options of one: {program.binary} up --help")


def _list_commands(program: Program, pairs: Sequence[tuple[str, str]], extra: str = "") -> None:
    daily = [pair for name in DAILY for pair in pairs if pair[0] == name]
    if not daily:  # those of a collection
        _display(program, pairs, extra)
        return
    print("Commands in daily use:\n")
    program.print_columns(daily)
    if _Shown.other_commands:
        print("Other commands:\n")
        program.print_columns([pair for pair in pairs if pair not in daily])


def _describe(context: ParserContext, name: str) -> tuple[str, str | None]:
    argument = context.args[name]
    value = f"={VALUES.get(name.replace('-', '_'), name.upper())}" if argument.kind is not bool else ""
    return f"--{name}{value}", argument.help


def _grouped_help(context: ParserContext) -> list[tuple[str, str | None]]:
    lines: list[tuple[str, str | None]] = []
    for group in Group:
        lines += [*([("", None)] if lines else []), (f"{group}:", None)]
        keys = [option.key for option in OPTIONS.values() if option.group == group]
        names = keys if keys else filter(_is_of_command, context.args)
        lines += [_describe(context, name) for name in names if name in context.args]
    return lines


def _is_of_command(name: str) -> bool:
    return name.replace("-", "_") not in OPTIONS


def _folders_with(file: str) -> Iterable[str]:
    return (path.parent.name for path in folders.runs_dir().glob(file))


def _overrides() -> Iterable[str]:
    given = {option.override for option in OPTIONS.values()}
    config, _, _ = configuration.resolve_config(Request())
    return (f"--{name}" for name, _ in flatten(dashed(config)) if name not in {*given, "preset"})


COMPLETIONS: dict[str, Callable[[], Iterable[str]]] = {
    **dict.fromkeys(("run", "other", "third", "fourth", "resume"), lambda: _folders_with("*/cluster.json")),
    "sweep": lambda: _folders_with(".sweeps/*/sweep.json"),
    "task": lambda: (task.name for task in folders.find_run().load_cluster().tasks),
    "kind": lambda: [*chaos.KINDS, chaos.STORM],
    "over": lambda: (f"{name.removeprefix('--')}=" for name in _overrides()),
    "precision": lambda: strategies.PRECISIONS,
    "preset": lambda: (path.stem for path in PRESETS.glob("[a-z]*.py")),
    "runtime": lambda: [registry.AUTO, *registry.RUNTIMES],
    "strategy": lambda: [strategies.AUTO, *strategies.STRATEGIES],
}
"""The functions that return the possible values of an argument, by its name."""


def find_candidates(collection: Collection, contexts: dict[str, ParserContext], typed: str) -> list[str]:
    """Return the possible values at the end of a command line; empty if invoke completes names, or on any error."""
    try:
        words = shlex.split(typed)[1:]
        if not words or words[0] not in collection.task_names:
            return []
        context = contexts[words[0]]
        if "--" in words:
            return list(_overrides()) if "preset" in context.args else []
        if words[-1].startswith("-") and not (words[-1] in context.flags and context.flags[words[-1]].takes_value):
            return []
        following = _values_after(context, words)
        if len(words) == 1:
            return following and [*collection.task_names, *following]
        here = [] if words[-1].startswith("-") else _values_after(context, words[:-1])
        return [*here, *following] if words[-1] in here or not here else here
    except (ClusterError, OSError, ValueError):
        return []


def _values_after(context: ParserContext, words: Sequence[str]) -> list[str]:
    num_positional, flag = 0, ""
    for word in words[1:]:
        if word == "=":  # bash splits words at it
            continue
        if argument := context.flags.get(word):
            flag = argument.name if argument.takes_value else ""
        elif flag:
            flag = ""
        else:
            num_positional += 1
    name = flag
    if not flag and num_positional < len(context.positional_args):
        name = context.positional_args[num_positional].name
    if name == "resume" and context.name == "sweep":
        name = "sweep"
    option = OPTIONS.get(name)
    values = COMPLETIONS.get(name)
    return list(values()) if values else list(option.choices) if option else []
