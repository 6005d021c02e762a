"""The user's part of a run: a script, folders of modules, extra packages, and environment variables.

Local processes use the files in place; in containers they are mounted read-only.

Tasks inherit only those variables of `up`'s caller that `payload.toml` lists. So a run does not depend on variables
that happen to be set, such as the TF_CONFIG of another cluster, and no secret reaches a task by accident. `--env`
extends the list.
"""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from cluster.contract import settings
from cluster.contract.spec import ClusterSpec
from cluster.system.errors import UsageError

_VARIABLES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PREFIXES, DEVICE_PREFIXES = _VARIABLES["prefixes"], _VARIABLES["device_prefixes"]
PROXIES = _VARIABLES["proxies"]
PROCESS = frozenset(_VARIABLES["process"])
NEVER_INHERITED = frozenset([*_VARIABLES["never_inherited"], settings.SECRET_FILES])
NEVER_SET = NEVER_INHERITED | {"PYTHONPATH", "RUNS_DIR"}
"""The variables that `--env` cannot set, because they are set for each task or in the environment of `up`."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
SCRIPT_MOUNT = "/script"
CODE_MOUNT = "/code"
PACKAGES_MOUNT = "/packages"
SECRETS_MOUNT = "/run/secrets"
DIRECT = {"grpc_proxy": ""}
"""The variable that keeps gRPC from calling other tasks through a proxy, which is for downloads; `--env` wins."""
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


def process_variables(names: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that local tasks inherit, with the additional ones of `--env`."""
    listed = PROCESS | {*names, *PROXIES}
    present = [name for name in os.environ if name in listed or name.startswith("LC_") or _for_every_task(name)]
    inherited = {name: os.environ[name] for name in present}
    if "PYTHONPATH" in inherited:  # tasks run in another folder than the caller
        inherited["PYTHONPATH"] = os.pathsep.join(python_path())
    return inherited


def container_variables(*, way_out: bool) -> dict[str, str | None]:
    """Return the variables that containers inherit. The value None means the caller's value at the start."""
    # Paths of this machine are invalid in a container.
    names = [name for name, value in os.environ.items() if _for_every_task(name) and not value.startswith("/")]
    names += [name for name in PROXIES if name in os.environ and way_out]
    return dict.fromkeys(names)


def _for_every_task(name: str) -> bool:
    return name not in NEVER_INHERITED and (name.startswith((*PREFIXES, *DEVICE_PREFIXES)) or name in settings.OF_TASKS)


def with_variables(variables: Mapping[str, str], command: str) -> str:
    """Return a shell command with these variables."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), command])


def python_path() -> list[str]:
    """Return the caller's PYTHONPATH with absolute folders: our commands run in another folder than the caller."""
    return [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def parse_variables(given: Sequence[str]) -> dict[str, str | None]:
    """Return the variables of `--env NAME[=VALUE]`. The value None means the value in this environment."""
    variables: dict[str, str | None] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not _NAME.fullmatch(name) or "\0" in value:
            raise UsageError(f"--env {option!r}: expected NAME or NAME=VALUE; write it as --env NAME=VALUE")
        if name in NEVER_SET:
            raise UsageError(f"--env {name}: it is set for each task, or where you call `up`; leave it out")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: it is not set here; set it, or give a value with --env {name}=VALUE")
        variables[name] = value if equals else None
    return variables


def recorded_variables(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE`; the value of `--env NAME` is the caller's and recorded nowhere."""
    return {name: value or "" for name, value in parse_variables([each for each in given if "=" in each]).items()}


def parse_secrets(given: Sequence[str], env: Sequence[str] = ()) -> dict[str, Path]:
    """Return the files of `--secret NAME=FILE`, keyed by variables, which `--env` must not set as well."""
    files: dict[str, Path] = {}
    for option in given:
        name, _, file = option.partition("=")
        if not _NAME.fullmatch(name) or not file:
            raise UsageError(f"--secret {option!r}: expected NAME=FILE, such as WANDB_API_KEY=~/.wandb-key")
        if name in NEVER_SET or name in parse_variables(env):
            raise UsageError(f"--secret {name}: it is set for each task, or by --env; leave one of them out")
        path = settings.expanded("secret", file).absolute()
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise UsageError(f"--secret {name}: {path} is not a file that you can read; write the value into one")
        files[name] = path
    return files


@dataclass(frozen=True)
class Payload:
    """The user's own code; empty for the built-in trainer with a built-in preset."""

    script: Path | None = None
    arguments: tuple[str, ...] = ()
    code_dirs: tuple[Path, ...] = ()
    requirements: Path | None = None
    packages: Path | None = None
    separate_chief: bool = False
    """Whether the script's TF_CONFIG has a chief; most scripts expect only workers."""
    env: tuple[str, ...] = ()
    """`--env` as typed: additional variables of the tasks."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """The files with the values of secret variables, by variable."""

    def mounted(self) -> Self:
        """Return the payload with its paths inside containers, see `mounts`."""
        return replace(
            self,
            script=self.script and Path(SCRIPT_MOUNT) / self.script.name,
            code_dirs=tuple(Path(CODE_MOUNT) / str(at) for at in range(len(self.code_dirs))),
            packages=self.packages and Path(PACKAGES_MOUNT),
            secrets={name: Path(SECRETS_MOUNT) / name for name in self.secrets},
        )

    def mounts(self) -> list[tuple[Path, str]]:
        """Return each folder and secret file to mount, with its path inside containers."""
        mounts = [(folder, f"{CODE_MOUNT}/{at}") for at, folder in enumerate(self.code_dirs)]
        if self.packages:
            mounts.append((self.packages, PACKAGES_MOUNT))
        if self.script:
            mounts.append((self.script.parent, SCRIPT_MOUNT))
        return [*mounts, *((file, f"{SECRETS_MOUNT}/{name}") for name, file in self.secrets.items())]

    @property
    def caller_variables(self) -> list[str]:
        """The variables that `--env NAME` takes from the caller, whose values are not stored in the run."""
        return [name for name, value in parse_variables(self.env).items() if value is None]

    def command(self) -> list[str]:
        """Return the arguments of the agent; none for the built-in trainer."""
        return [] if self.script is None else ["--script", str(self.script), *self.arguments]

    def environment(self, spec: ClusterSpec, path: Sequence[str] = ()) -> dict[str, str | None]:
        """Return the tasks' variables, with `path` as PYTHONPATH. The value None means the caller's value."""
        variables = DIRECT | parse_variables(self.env)
        if path:
            variables["PYTHONPATH"] = os.pathsep.join(path)
        if self.secrets:
            variables[settings.SECRET_FILES] = json.dumps({name: str(file) for name, file in self.secrets.items()})
        if self.script is None:
            return variables
        variables["PYTHONUNBUFFERED"] = "1"
        if self.needs_legacy_keras(spec):
            variables[LEGACY_KERAS] = "1"
        return variables

    @property
    def path(self) -> list[str]:
        """The folders of the user's modules and packages."""
        return [*map(str, self.code_dirs), *([str(self.packages)] if self.packages else [])]

    def local_path(self) -> list[str]:
        """Return PYTHONPATH for processes on this machine; empty if the caller's PYTHONPATH is enough."""
        return list(dict.fromkeys([*self.path, *python_path()])) if self.path else []

    def trial_environment(self) -> dict[str, str]:
        """Return the environment in which the user's model is tried: that of a local task."""
        values = recorded_variables(self.env) | settings.read_secrets(self.secrets)
        path = os.pathsep.join(self.local_path() or python_path())
        return process_variables(self.caller_variables) | values | {"PYTHONPATH": path}

    def needs_legacy_keras(self, spec: ClusterSpec) -> bool:
        """Whether tf.keras must be Keras 2: Keras 3's own `fit` does not know the strategy."""
        chosen = LEGACY_KERAS in os.environ or LEGACY_KERAS in parse_variables(self.env)
        return self.script is not None and spec.kind.legacy_fit and not chosen

    def to_json(self) -> dict[str, Any]:
        """Return the `config.json` of a script's run."""
        return {"script": str(self.script), "arguments": list(self.arguments), "separate_chief": self.separate_chief}


def data_words(config: Mapping[str, Any]) -> list[str]:
    """Return the `python -m train.data` subcommand, with options, that prepares a configuration's data."""
    source = config.get("source")
    if source == "function":
        outputs = config.get("num_outputs")
        return ["examine", f"--seed={config['seed']}", *([f"--num-outputs={outputs}"] if outputs else [])]
    return ["shard" if source == "stream" else "prepare"]
