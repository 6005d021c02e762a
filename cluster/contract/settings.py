"""The project's environment variables, each with its default and range; an empty variable counts as unset.

They are checked before anything starts, so that `up` reports a typo rather than a task.
"""

import contextlib
import math
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.files import ROOT
from cluster.system.messages import described


@dataclass(frozen=True)
class Seconds:
    """A setting in seconds, with its default and range."""

    default: float
    low: float
    high: float
    tasks: bool = False
    """Whether tasks read the setting, too."""


SECONDS = {
    "RENDEZVOUS_TIMEOUT_S": Seconds(60.0, 0.1, 86_400, tasks=True),
    "SCRIPT_GRACE_S": Seconds(10.0, 0, 3_600, tasks=True),
    "RESTART_PAUSE_S": Seconds(1.0, 0, 30, tasks=True),
    "STANDBY_DELAY_S": Seconds(10.0, 0, 86_400, tasks=True),
    "PRESET_TIMEOUT_S": Seconds(120.0, 0.1, 86_400),
    "DATA_TIMEOUT_S": Seconds(3_600.0, 0.1, 10_000_000),
}
SWITCHES = ("STANDBY", "SHARED_IMPORT")
"""The settings that are on unless set to 0. Tasks read them, too."""

SECRET_FILES = "SECRET_FILES"  # noqa: S105  # the paths of the secrets
"""The variable that maps a task's `--secret` variables to the paths of their files, as JSON."""

OF_TASKS = frozenset([*SWITCHES, *(name for name, setting in SECONDS.items() if setting.tasks)])


def check_settings() -> None:
    """Check all settings."""
    for name in SECONDS:
        seconds(name)
    for name in SWITCHES:
        is_on(name)


def is_set(name: str) -> bool:
    """Whether the environment has a value for a setting."""
    return bool(os.environ.get(name))


def seconds(name: str) -> float:
    """Return the value of one of `SECONDS`; raise UsageError if it is not a number, or out of range."""
    setting = SECONDS[name]
    text = os.environ.get(name) or str(setting.default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not setting.low <= value <= setting.high:
        expected = f"seconds from {setting.low:g} to {setting.high:.0f}"
        raise UsageError(f"{name}={text!r}: expected {expected}; correct or unset it (default: {setting.default:g})")
    return value


def is_on(name: str) -> bool:
    """Return the value of one of `SWITCHES`; raise UsageError if it is neither 0 nor 1."""
    text = os.environ.get(name) or "1"
    if text not in ("0", "1"):
        raise UsageError(f"{name}={text!r}: expected 0 or 1; correct or unset it (default: 1)")
    return text == "1"


def one_core_threads() -> dict[str, str]:
    """Return the variable that gives TensorFlow several inter-op threads if this process may use only one core.

    With one thread, tasks of a parameter-server cluster deadlock. Their servers read only this variable.
    """
    return {"TF_NUM_INTEROP_THREADS": "4"} if len(os.sched_getaffinity(0)) == 1 else {}


def folder(name: str, default: str) -> Path:
    """Return the absolute path in the variable `name`, or the folder `default` of this checkout."""
    return Path(os.environ.get(name) or ROOT / default).absolute()


def home() -> Path | None:
    """Return the user's home folder; None if neither HOME nor the system's user database has an absolute path."""
    named = os.environ.get("HOME", "")
    with contextlib.suppress(KeyError):
        named = named or pwd.getpwuid(os.getuid()).pw_dir
    return Path(named) if Path(named).is_absolute() else None


def expanded(option: str, name: str) -> Path:
    """Return the path `name` of an option with `~` expanded; raise UsageError if the home folder is unknown."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"--{option} {name!r}: no home folder is known for the `~`; write the path in full") from None


def read_secrets(paths: Mapping[str, str | Path]) -> dict[str, str]:
    """Read the variables of `--secret` from their files, without trailing line breaks; or raise PrerequisiteError."""
    found = {}
    for name, path in paths.items():
        try:
            found[name] = Path(path).read_text().rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise PrerequisiteError(f"--secret {name}: {path} cannot be read: {described(error)}") from None
    return found
