"""What a run was made of: `manifest.json` in its folder, enough to repeat it elsewhere and to name the differences.

No host path, user name or secret goes into it. It is written when the run starts; the chief adds its data and the
environment that it computes in (`train/telemetry/environment.py`).
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
"""The folders whose files run; others may hold anything."""


def write_manifest(plan: Plan) -> None:
    """Write the manifest of a run that is about to start; of a script it has the name and contents, not the place."""
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
    """Return which code runs: a hash of each folder's files and, in a git checkout, where they come from."""
    hashes = {f"{part}_sha256": _tree(ROOT / part) for part in CODE}
    if not (commit := checkout.commit()):
        return {"commit": None, **hashes}
    return {"commit": commit, "changes_sha256": checkout.changes_sha256(*CODE), **hashes}


def _own_code(payload: Payload) -> dict[str, str]:
    """Return a hash of each folder with modules of the user's own, by its place and name, and of their requirements."""
    hashes = {f"{at}/{folder.name}": _tree(folder) for at, folder in enumerate(payload.code_dirs)}
    if payload.requirements:
        hashes[payload.requirements.name] = sha256(payload.requirements)
    return hashes


def _tree(folder: Path) -> str:
    return files_sha256(folder, _modules(folder))


def _modules(folder: Path) -> Iterator[str]:
    """Yield the names of the Python files of a folder, which may be a whole project or a home folder.

    What is hidden and virtual environments are left out, and so is a link to nothing: an editor locks a file with one.
    """
    for at, inside, files in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".") and not Path(at, name, "pyvenv.cfg").exists()]
        paths = (Path(at, name) for name in files if name.endswith(".py"))
        yield from (str(path.relative_to(folder)) for path in paths if path.is_file())
