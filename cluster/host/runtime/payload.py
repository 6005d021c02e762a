"""The user's own code in a run: a script, folders of modules, extra packages.

Local processes use these in place; containers get them mounted, read-only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.contract.settings import SECRET_FILES
from cluster.contract.spec import ClusterSpec
from cluster.host.runtime import inherited

SCRIPT_MOUNT = "/script"
CODE_MOUNT = "/code"
PACKAGES_MOUNT = "/packages"
SECRETS_MOUNT = "/run/secrets"
LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


@dataclass(frozen=True)
class Payload:
    """The user's own code; empty for the built-in trainer with a built-in preset."""

    script: Path | None = None
    arguments: tuple[str, ...] = ()
    code_dirs: tuple[Path, ...] = ()
    requirements: Path | None = None
    packages: Path | None = None
    """The folder with the packages of `requirements`."""
    separate_chief: bool = False
    """Whether the script's TF_CONFIG has a chief and workers, and not workers alone, as most scripts expect."""
    env: tuple[str, ...] = ()
    """`--env` as typed: variables that the tasks get besides."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """The files with the values of further variables, by their names."""

    def mounted(self) -> Payload:
        """Return it with the paths at which it is mounted, see `mounts`."""
        return replace(
            self,
            script=self.script and Path(SCRIPT_MOUNT) / self.script.name,
            code_dirs=tuple(Path(CODE_MOUNT) / str(at) for at in range(len(self.code_dirs))),
            packages=self.packages and Path(PACKAGES_MOUNT),
            secrets={name: Path(SECRETS_MOUNT) / name for name in self.secrets},
        )

    def mounts(self) -> list[tuple[Path, str]]:
        """Return each folder, and each secret's file, that is mounted, and its path in the task."""
        found = [(folder, f"{CODE_MOUNT}/{at}") for at, folder in enumerate(self.code_dirs)]
        if self.packages:
            found.append((self.packages, PACKAGES_MOUNT))
        if self.script:
            found.append((self.script.parent, SCRIPT_MOUNT))
        return [*found, *((file, f"{SECRETS_MOUNT}/{name}") for name, file in self.secrets.items())]

    @property
    def caller_variables(self) -> list[str]:
        """The variables that `--env NAME` takes from the caller: their values are in no file of the run."""
        return [name for name, value in inherited.parse(self.env).items() if value is None]

    def command(self) -> list[str]:
        """Return the arguments of the agent; none for the built-in trainer."""
        return [] if self.script is None else ["--script", str(self.script), *self.arguments]

    def environment(self, spec: ClusterSpec, path: Sequence[str] = ()) -> dict[str, str | None]:
        """Return the variables of the tasks, with their PYTHONPATH; None is the value that the caller has."""
        found = inherited.parse(self.env)
        if path:
            found["PYTHONPATH"] = os.pathsep.join(path)
        if self.secrets:
            found[SECRET_FILES] = json.dumps({name: str(file) for name, file in self.secrets.items()})
        if self.script is None:
            return found
        found["PYTHONUNBUFFERED"] = "1"
        if self.needs_legacy_keras(spec):
            found[LEGACY_KERAS] = "1"
        return found

    @property
    def path(self) -> list[str]:
        """The folders that contain its modules."""
        return [*map(str, self.code_dirs), *([str(self.packages)] if self.packages else [])]

    def local_path(self) -> list[str]:
        """Return PYTHONPATH for processes of this machine; empty if the caller's own is enough."""
        return list(dict.fromkeys([*self.path, *inherited.python_path()])) if self.path else []

    def needs_legacy_keras(self, spec: ClusterSpec) -> bool:
        """Whether tf.keras must be Keras 2: Keras 3's own `fit` does not know the strategy."""
        chosen = LEGACY_KERAS in os.environ or LEGACY_KERAS in inherited.parse(self.env)
        return self.script is not None and spec.kind.legacy_fit and not chosen

    def to_json(self) -> dict[str, Any]:
        """Return the form that is saved as the `config.json` of a script's run."""
        return {"script": str(self.script), "arguments": list(self.arguments), "separate_chief": self.separate_chief}


def data_words(config: Mapping[str, Any]) -> list[str]:
    """Return the command of `python -m train.data` that gets a configuration's data, and its options."""
    source = config.get("source")
    if source == "function":
        outputs = config.get("num_outputs")
        return ["examine", f"--seed={config['seed']}", *([f"--num-outputs={outputs}"] if outputs else [])]
    return ["shard" if source == "stream" else "prepare"]
