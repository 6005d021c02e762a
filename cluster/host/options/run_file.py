"""A run file: the options of `up` and the training overrides as TOML, to be committed with a model.

    workers = 3
    env = ["NCCL_ALGO=Ring"]

    [train]
    epochs = 1

    [train.optimizer]
    learning-rate = 0.001

Keys are the names of the options. A script has `args` in place of `[train]`. Paths are relative to the file.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.contract import settings
from cluster.host.options.request import OPTIONS, OVERRIDES, TYPES, Group, Option, Request
from cluster.system.errors import UsageError, nearest
from cluster.system.files import ROOT
from cluster.system.messages import COMMAND, short_path

TRAIN, ARGS = "train", "args"
USERS = ("keep_warm",)
"""The options that may be in the user's configuration, too."""
VARIABLES = ("env", "secret")
"""The options that give the tasks' variables, which are merged by name."""
_KEYS = {option.key: option for option in OPTIONS.values()}


@dataclass(frozen=True)
class RunFile:
    """The contents of a run file."""

    path: Path
    options: Mapping[str, Any]
    train: tuple[str, ...]
    """The overrides of the training configuration, as words of a command line."""
    args: tuple[str, ...]

    def request(self, given: Mapping[str, Any], words: Sequence[str]) -> Request:
        """Return the request of this file and a command line with `words` after `--`, which takes precedence."""
        added = {name: merge_by_name(self.options.get(name, ()), given.get(name, ())) for name in VARIABLES}
        options = {**self.options, **given, **added, "code_dir": str(self.path.parent)}
        return Request(**options, overrides=tuple(words), train=self.train, args=self.args)


def read_run_file(name: str, taken: Collection[str] = tuple(OPTIONS)) -> RunFile:
    """Read a run file, without options that a task does not take; raise UsageError if it is invalid.

    An option that determines what trains cannot be left out; it raises UsageError, too.
    """
    path = Path(os.path.expanduser(name)).absolute()  # noqa: PTH111  # leaves a home folder that is not known
    try:
        table = dashed(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--file {name!r}: {error.strerror}; expected a TOML file with options of `up`") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--file {name!r}: {error}; expected TOML") from None
    train, args = table.pop(TRAIN, {}), table.pop(ARGS, [])
    if not isinstance(train, dict):
        raise UsageError(f"{short_path(path)}: train = {_shown(train)}: expected a table, [train]")
    if not _is_strings(args):
        raise UsageError(f"{short_path(path)}: args = {_shown(args)}: expected {TYPES[list]}")
    options = {}
    for key, value in table.items():
        if (option := _KEYS.get(key)) is None:
            meant = nearest(key, [*_KEYS, TRAIN, ARGS])
            raise UsageError(f"{short_path(path)}: {key!r} is not an option of `up`{meant}")
        checked = _value(option, value, path)
        if option.name in taken:
            options[option.name] = checked
        elif option.group == Group.TRAINS and option.is_given(checked) and option.name != "reuse_data":
            raise UsageError(f"{short_path(path)}: {key!r} cannot be used here; give this command a file without it")
    words = []
    for word in _words(train, "", path):
        name, equals, value = word.partition("=")
        same = OVERRIDES.get(name)
        if same and same.name in taken and bool(equals) is (same.types != (bool,)):
            options.setdefault(same.name, value if equals else True)
        else:
            words.append(word)
    return RunFile(path, options, tuple(words), tuple(args))


def merge_by_name(earlier: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Return the values of an option in `VARIABLES`; for each name the last one counts."""
    return tuple({word.partition("=")[0]: word for word in (*earlier, *later)}.values())


def read_user_file() -> Mapping[str, Any]:
    """Read the options in the user's configuration, which may only be `USERS`; raise UsageError if it is invalid."""
    folder = os.environ.get("XDG_CONFIG_HOME") or (settings.home() or ROOT) / ".config"
    path = Path(folder, "tf-cluster", "config.toml")
    if not path.exists():
        return {}
    found = read_run_file(str(path))
    if others := [*(name for name in found.options if name not in USERS), *found.train, *found.args]:
        raise UsageError(f"{short_path(path)}: {others[0]} is for a run file; here only {', '.join(USERS)} is known")
    return found.options


def write_run_file(name: str, request: Request, config: Mapping[str, Any]) -> Path:
    """Write a run file that reproduces a request's plan; return its path. Raises UsageError if it cannot be written."""
    path = Path(os.path.expanduser(name)).absolute()  # noqa: PTH111
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(render_run_file(request, config, path.parent))
    except FileExistsError:
        raise UsageError(f"--write {name!r} exists; remove it, or name another file") from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "an option cannot be encoded"
        raise UsageError(f"--write {name!r}: {reason}; name a file that can be written") from None
    return path


def render_run_file(request: Request, config: Mapping[str, Any], folder: Path) -> str:
    """Return a request as TOML: the options that are set, under the headings of their groups.

    `config`, the plan's configuration, determines the types of training overrides; paths are relative to `folder`.
    """
    options = {name: getattr(request, name) for name in OPTIONS if request.is_given(name)}
    train: dict[str, Any] = {}
    scripted = "script" in config
    if not scripted:
        for key, value in _overridden([*request.train, *request.overrides], config).items():
            if key in _KEYS:
                options[_KEYS[key].name] = value if _KEYS[key].types == (int,) else str(value)
            else:
                train[key] = value
    lines = [f"# Read by `{COMMAND} up --file` and `{COMMAND} plan --file`; options on the command line win."]
    for group in Group:
        if members := [option for option in OPTIONS.values() if option.group == group and option.name in options]:
            lines += ["", f"# {group}"]
            lines += [f"{option.key} = {_toml(option, options[option.name], folder)}" for option in members]
    if scripted and request.arguments:
        lines += ["", "# The script's arguments", f"{ARGS} = {_literal(list(request.arguments))}"]
    for table in sorted({key.rpartition(".")[0] for key in train}):
        lines += ["", f"[{'.'.join(filter(None, [TRAIN, table]))}]"]
        keys = [key for key in train if key.rpartition(".")[0] == table]
        lines += [f"{key.rpartition('.')[2]} = {_literal(train[key])}" for key in keys]
    return "\n".join([*lines, ""])


def _value(option: Option, value: Any, path: Path) -> Any:
    if type(value) not in option.types or (isinstance(value, list) and not _is_strings(value)):
        raise UsageError(f"{short_path(path)}: {option.key} = {_shown(value)}: expected {option.type}")
    if isinstance(value, list):
        return tuple(_each_file(item, path.parent, _next_to) if option.is_path else item for item in value)
    if value and option.names_path(value):
        return _next_to(value, path.parent)
    return str(value) if str in option.types else value


def _next_to(value: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(value))  # noqa: PTH111


def _relative(value: str, folder: Path) -> str:
    path = Path(os.path.expanduser(value)).absolute()  # noqa: PTH111
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _each_file(words: str, folder: Path, change: Callable[[str, Path], str]) -> str:
    name, equals, value = words.partition("=")
    return f"{name}={change(value, folder)}" if equals else words


def _words(table: Mapping[str, Any], parent: str, path: Path) -> Iterator[str]:
    for name, value in table.items():
        key = parent + name
        if key in _KEYS:
            raise UsageError(f"{short_path(path)}: {key!r} is an option of `up`; move it above [train]")
        if isinstance(value, dict):
            yield from _words(value, f"{key}.", path)
        elif isinstance(value, bool):
            yield f"--{key}" if value else f"--no-{key}"
        elif isinstance(value, str | int | float):
            yield f"--{key}={value}"
        else:
            raise UsageError(f"{short_path(path)}: {key} = {_shown(value)}: expected a string, a number or a boolean")


def _overridden(words: Sequence[str], config: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(flatten(dashed(config)))
    typed = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    names = [name.replace("_", "-") for name in typed]
    names = [name if name in fields else re.sub(r"^(.+\.)?no-", r"\1", name) for name in names]
    return {name: fields[name] for name in names if name in fields}


def flatten(value: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects, each with its dotted key, such as `part.field`."""
    for name, part in value.items():
        if isinstance(part, Mapping):
            yield from flatten(part, f"{parent}{name}.")
        else:
            yield f"{parent}{name}", part


def dashed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with dashes in its keys, so that `global_batch` is accepted for `global-batch`."""
    return {key.replace("_", "-"): dashed(value) if isinstance(value, dict) else value for key, value in table.items()}


def _toml(option: Option, value: Any, folder: Path) -> str:
    if isinstance(value, str) and option.names_path(value):
        return _literal(_relative(value, folder))
    if option.is_path and not isinstance(value, str):
        return _literal([_each_file(item, folder, _relative) for item in value])
    if int in option.types and re.fullmatch("0|[1-9][0-9]*", str(value)):
        return str(value)
    return _literal(list(value) if isinstance(value, tuple) else value)


def _literal(value: Any) -> str:
    """Return a configuration's value as TOML, which has no null."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value) if value is not None else '"None"'


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
