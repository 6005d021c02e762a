"""The inputs of a run: `manifest.json` in its folder, enough to repeat the run elsewhere and to name the differences.

It contains no host path, user name or secret. It is written when the run starts; the chief adds its data and its
environment (`train/telemetry/environment.py`).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.contract import tf_config
from cluster.host.image import checkout, locks
from cluster.host.launch import user_files
from cluster.host.launch.plan import Plan
from cluster.host.runtime.payload import Payload
from cluster.system.files import files_sha256, sha256
from cluster.system.json_files import write_json
from cluster.system.paths import ROOT

SCHEMA = 1
CODE = ("cluster", "train")
"""The folders of this checkout that contain the code of a run."""


def write_manifest(plan: Plan) -> None:
    """Write the manifest of a run that is about to start. It has a script's name and hash, but not its path."""
    script = plan.payload.script
    value = {
        "schema": SCHEMA,
        "run": plan.run.name,
        "code": _code(),
        "locks": {f"{target}.lock": sha256(ROOT / locks.DIRECTORY / f"{target}.lock") for target in locks.TARGETS},
        "runtime": plan.runtime.name,
        "network": plan.network.name,
        "image": plan.runtime.image(plan),
        "config": plan.config | ({"script": script.name, "script_sha256": sha256(script)} if script else {}),
        "init": user_files.hash_weights(plan.run.init),
        "own_code": _own_code(plan.payload),
        "elastic": dict(plan.elastic),
        "cluster": plan.cluster.to_json(),
        "tf_config": {task.name: tf_config.render(plan.cluster, task) for task in plan.cluster.tasks},
    }
    write_json(plan.run.manifest, value)


def _code() -> dict[str, Any]:
    """Return a hash of each code folder and, in a git checkout, the commit and a hash of its changes."""
    hashes = {f"{part}_sha256": _tree(ROOT / part) for part in CODE}
    if not (commit := checkout.commit()):
        return {"commit": None, **hashes}
    return {"commit": commit, "changes_sha256": checkout.changes_sha256(*CODE), **hashes}


def _own_code(payload: Payload) -> dict[str, str]:
    """Return a hash of each folder of the user's modules, by its position and name, and of their requirements."""
    hashes = {f"{at}/{folder.name}": _tree(folder) for at, folder in enumerate(payload.code_dirs)}
    if payload.requirements:
        hashes[payload.requirements.name] = sha256(payload.requirements)
    return hashes


def _tree(folder: Path) -> str:
    return files_sha256(folder, _modules(folder))


def _modules(folder: Path) -> Iterator[str]:
    """Yield the names of the Python files of a folder, which may be a whole project or a home folder.

    Hidden files, virtual environments and dangling links, with which an editor may lock a file, are left out.
    """
    for at, inside, files in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".") and not Path(at, name, "pyvenv.cfg").exists()]
        paths = (Path(at, name) for name in files if name.endswith(".py"))
        yield from (str(path.relative_to(folder)) for path in paths if path.is_file())
