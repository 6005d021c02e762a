"""Which runs this user started here: their records, sealed, so that neither a task nor another machine can pass for us.

A run's records say what the next command starts: a preset's modules, a script, packages, on which runtime. They lie in
the run's folder, which its tasks can write and anybody can hand on. So whoever writes them seals them: their digests,
authenticated with a key of the user's that no container sees, beside the run folders, where no task can write. What the
tasks themselves write later, such as checkpoints, is not sealed: it comes from the program that was sealed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster import settings
from cluster.errors import PrerequisiteError, UsageError
from cluster.run.folder import RunFolder
from cluster.system.files import DamagedError, read_json, write_json

KEY_BYTES = 32
ADDED_BY_TASKS = ("data", "environment")
"""What the chief adds to the manifest once it trains."""


def write(run: RunFolder) -> None:
    """Seal a run's records as they are now.

    Raises:
        PrerequisiteError: there is no key, and none can be made.
    """
    digests = dict(_digests(run))
    write_json(run.seal, {"records": digests, "hmac": _authenticate(run.name, digests)})


def check(run: RunFolder) -> None:
    """Check that a run's records are those that this user sealed.

    Raises:
        UsageError: they are not.
        PrerequisiteError: there is no key, and none can be made.
    """
    sealed = _read_seal(run)
    if sealed is None:
        raise UsageError(
            f"run {run.name!r} has no seal of yours: it was copied, renamed or started by somebody else, or is older "
            "than seals, and could run any program here; add --trust if you trust whoever made it"
        )
    found = dict(_digests(run))
    if changed := sorted(name for name in found.keys() | sealed.keys() if found.get(name) != sealed.get(name)):
        raise UsageError(
            f"run {run.name!r}: {' and '.join(changed)} changed since you started it, perhaps by its own tasks, and "
            "could run any program here; read that first, then add --trust"
        )


def check_hidden(folders: Iterable[Path]) -> None:
    """Check that the key lies in none of the folders that containers see.

    Raises:
        UsageError: it does.
    """
    for folder in folders:
        if _key_path().resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"containers would see {folder}, and in it {_key_path()}, with which runs are sealed; use a folder of "
                "its own, or set XDG_STATE_HOME to one outside of it"
            )


def key() -> bytes:
    """Return this user's key, made when it is first asked for.

    Raises:
        PrerequisiteError: it cannot be made, or others could read it or have made it.
    """
    path = _key_path()
    try:
        if not path.exists():
            _make_key(path)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status, found = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except OSError as error:
        raise PrerequisiteError(
            f"{path}, the key with which runs are sealed: {error.strerror}; set XDG_STATE_HOME to a folder that you own"
        ) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or len(found) != KEY_BYTES:
        raise PrerequisiteError(
            f"{path}, the key with which runs are sealed: expected {KEY_BYTES} bytes of yours that nobody else can "
            "read; remove it (your runs then need --trust once), or set XDG_STATE_HOME to a folder that you own"
        )
    return found


def _key_path() -> Path:
    """Return where the key is: with the user's state, in no checkout, run or folder of data."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if Path(state).is_absolute():  # as XDG has it
        return Path(state) / "tf-cluster" / "key"
    if (home := settings.home()) is None:
        raise PrerequisiteError(
            "the key with which runs are sealed has no place: HOME is not set, and the system knows no home folder of "
            f"user {os.getuid()}; set HOME, or XDG_STATE_HOME to a folder that you own"
        )
    return home / ".local" / "state" / "tf-cluster" / "key"


def _make_key(path: Path) -> None:
    """Make the key, whole, unless another command did so in this moment."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        scratch.unlink()


def _read_seal(run: RunFolder) -> dict[str, str] | None:
    """Return the digests that this user sealed; None where there are none, or they are somebody else's."""
    if not _key_path().exists():
        return None  # whose ever it is
    try:
        value = read_json(run.seal)
        digests, told = value["records"], value["hmac"]
        good = hmac.compare_digest(_authenticate(run.name, digests), told)
    except (DamagedError, FileNotFoundError, KeyError, TypeError):
        return None
    return digests if good else None


def _authenticate(name: str, digests: dict[str, str]) -> str:
    """Return what only who has the key can tell of a run: by its name, so that no seal fits another."""
    return hmac.new(key(), _canonical({"run": name, "records": digests}), hashlib.sha256).hexdigest()


def _digests(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield each record that commands believe, and its digest."""
    for path in (run.config, run.cluster, run.compose, run.control / "started.json", run.manifest):
        try:
            value = read_json(path)
        except FileNotFoundError:
            value = None
        except DamagedError:
            value = {"unreadable": True}
        if path == run.manifest and isinstance(value, dict):
            value = {name: part for name, part in value.items() if name not in ADDED_BY_TASKS}
        yield str(path.relative_to(run.path)), hashlib.sha256(_canonical(value)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
