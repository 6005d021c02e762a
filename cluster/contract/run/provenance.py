"""The runs that this user has started: digests of their records, kept where no container can write.

The records of a run determine which programs the next command starts: a preset's modules, a script, packages. They are
in the run folder, which the tasks can write and anybody can copy. So starting a run also notes the digests of its
records in the user's state folder (`$XDG_STATE_HOME/tf-cluster/runs/`), and a run is trusted only if its records match
a note of its name. Files that the tasks write later, such as checkpoints, are not covered.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.contract import settings
from cluster.contract.run.folder import RunFolder
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import read_json, write_json

ADDED_BY_TASKS = ("data", "environment")
"""The parts of the manifest that the chief adds during training."""
NOTES = 16
"""Number of notes kept for a name, which may be used in several RUNS_DIRs and again with --fresh."""
FIX = "set XDG_STATE_HOME to a folder that you own"


def write_note(run: RunFolder) -> None:
    """Note the digests of a run's records, in the folder of `create_folder`."""
    create_folder()
    digests = dict(_digests(run))
    others = [note for note in _notes(run.name) if note != digests and "rewriting" not in note]
    write_json(_path(run.name), [digests, *others][:NOTES])


def note_rewriting(run: RunFolder) -> None:
    """Note, until `write_note`, that this user's command is changing a run's records, in case it is killed."""
    create_folder()
    write_json(_path(run.name), [_rewriting(run), *_notes(run.name)][:NOTES])


def _rewriting(run: RunFolder) -> dict[str, str]:
    """Return the note for a run whose records are being changed; it is valid only for this folder."""
    status = run.path.stat()
    return {"rewriting": f"{run.path.resolve()} {status.st_dev} {status.st_ino}"}


def check_trusted(run: RunFolder) -> None:
    """Check that a run's records match a note; raise UsageError if they do not."""
    records, notes = dict(_digests(run)), _notes(run.name)
    if records in notes or _rewriting(run) in notes:
        return
    if not notes:
        why = "it was copied, renamed or made by somebody else and could run any program here"
        fix = "add --trust if you trust its author"
        raise UsageError(f"run {run.name!r} was not started by you on this machine: {why}; {fix}")
    changed = min((_differences(records, note) for note in notes), key=len)
    problem = f"{' and '.join(changed)} changed since you started it, perhaps by its own tasks"
    raise UsageError(f"run {run.name!r}: {problem}, and could run any program here; read that first, then add --trust")


def check_hidden(folders: Iterable[Path]) -> None:
    """Check that the notes are in none of the folders that containers see; raise UsageError if they are."""
    for folder in folders:
        if _folder().resolve().is_relative_to(folder.resolve()):
            seen = f"containers would see {folder}, and in it {_folder()}, the record of which runs are yours"
            raise UsageError(f"{seen}; use another folder, or set XDG_STATE_HOME to one outside of it")


def create_folder() -> None:
    """Create the folder of the notes; raise PrerequisiteError if it cannot be created, or belongs to another user."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.stat().st_uid
        if owner == os.geteuid():
            return
        problem = f"expected a folder of user {os.geteuid()}, it belongs to user {owner}"
    except OSError as error:
        problem = str(error.strerror)
    raise PrerequisiteError(f"{folder}, the record of which runs are yours: {problem}; {FIX}")


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    if Path(state).is_absolute():  # XDG says to ignore a relative path
        return Path(state) / "tf-cluster" / "runs"
    if (home := settings.home()) is None:
        problem = "HOME is not set and the system has no home folder for this user"
        raise PrerequisiteError(f"{problem}, so there is nowhere to record which runs are yours; {FIX}")
    return home / ".local" / "state" / "tf-cluster" / "runs"


def _path(name: str) -> Path:
    return _folder() / f"{name}.json"


def _notes(name: str) -> list[dict[str, str]]:
    """Return the notes of a run's name, newest first; none if they are unreadable or belong to another user."""
    path = _path(name)
    try:
        notes = read_json(path, []) if path.parent.stat().st_uid == os.geteuid() else []
    except (OSError, ValueError):
        return []
    return [note for note in notes if isinstance(note, dict)] if isinstance(notes, list) else []


def _differences(records: dict[str, str], note: dict[str, str]) -> list[str]:
    return sorted(name for name in records.keys() | note.keys() if records.get(name) != note.get(name))


def _digests(run: RunFolder) -> Iterator[tuple[str, str]]:
    staged = [run.stages] if run.stages.exists() else []
    for path in (run.config, run.cluster, run.compose, run.control / "started.json", run.manifest, *staged):
        try:
            value: Any = read_json(path, None)
        except ValueError:
            value = {"unreadable": True}
        if path == run.manifest and isinstance(value, dict):
            value = {name: part for name, part in value.items() if name not in ADDED_BY_TASKS}
        yield str(path.relative_to(run.path)), hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
