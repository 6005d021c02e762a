"""Completion of values for the shell: runs, tasks, faults, presets and training options.

invoke completes the names of tasks and options. Its scripts pass the words that were typed without the empty one that
may follow them, and the shell keeps the candidates that begin as the last word does.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence

from invoke import Collection
from invoke.parser import ParserContext

from cluster.contract import strategies
from cluster.host.control import chaos
from cluster.host.launch import configuration, folders
from cluster.host.options.request import OPTIONS, PRESETS, Request
from cluster.host.options.run_file import dashed, flatten
from cluster.host.runtime import registry
from cluster.system.errors import ClusterError


def _folders_with(file: str) -> Iterable[str]:
    return (path.parent.name for path in folders.runs_dir().glob(file))


def _overrides() -> Iterable[str]:
    given = {option.override for option in OPTIONS.values()}
    config, _, _ = configuration.resolve_config(Request())
    return (f"--{name}" for name, _ in flatten(dashed(config)) if name not in {*given, "preset"})


VALUES: dict[str, Callable[[], Iterable[str]]] = {
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
"""Returns the values of an argument, by its name."""


def find_candidates(collection: Collection, contexts: dict[str, ParserContext], typed: str) -> list[str]:
    """Return the values that may stand where a command line ends; empty where invoke completes names, or on any error.

    `contexts` holds the arguments of each task, by name; `typed` begins with the program's name.
    """
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
    name, num_positional, flag = "", 0, ""
    for word in words[1:]:
        if word == "=":  # bash splits words there
            continue
        argument = context.flags.get(word)
        if argument:
            flag = argument.name if argument.takes_value else ""
        elif flag:
            flag = ""
        else:
            num_positional += 1
    if flag:
        name = flag
    elif num_positional < len(context.positional_args):
        name = context.positional_args[num_positional].name
    if name == "resume" and context.name == "sweep":
        name = "sweep"
    option = OPTIONS.get(name)
    values = VALUES.get(name)
    return list(values()) if values else list(option.choices) if option else []
