"""The files of checkpoints: written so that no kill or full disk loses a good one, checked before they are used.

    checkpoints/ckpt-200.index  ckpt-200.data-00000-of-00001   TensorFlow's own files
    checkpoints/ckpt-200.json                                  their names, sizes and sha256; written last
    checkpoints/ckpt-200+1.index                               those of a second save of the step: the record's word
    checkpoints/.ckpt-<generation>-*                           what is being written
    checkpoints/best/                                          the checkpoint of the best evaluation, likewise
    checkpoints/aside/                                         what the newest restore passed over

A checkpoint without its JSON file was never finished, and does not count. One task writes, the chief; all others read.
This module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.system.errors import RunFailed
from cluster.system.files import sha256, sync
from cluster.system.json_files import read_json, write_json

ASIDE = "aside"
BEST = "best"
NO_CHECKPOINT = -1
_RECORD = re.compile(r"ckpt-(\d+)\.json")
_DATA = re.compile(r"ckpt-(\d+)(?:\+\d+)?\.(?:index|data-.*)")
_SCRATCH = re.compile(r"\.ckpt-(\d+)-.*")


class Writer(Protocol):
    """What writes TensorFlow's files, such as a `tf.train.Checkpoint`."""

    def write(self, prefix: str) -> Any:
        """Write them with this prefix."""


@dataclass(frozen=True)
class Saved:
    """A finished checkpoint."""

    folder: Path
    step: int

    @property
    def name(self) -> str:
        """What its files' names begin with; of a second save of this step a number follows."""
        return f"ckpt-{self.step}"

    @property
    def prefix(self) -> str:
        """What TensorFlow restores it by."""
        return str(self.folder / read_json(self.record).get("prefix", self.name))

    @property
    def record(self) -> Path:
        """The file that makes it count."""
        return self.folder / f"{self.name}.json"

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """What its record says: the files' sizes in bytes and their sha256."""
        try:
            return {name: (of["size_bytes"], of["sha256"]) for name, of in read_json(self.record)["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def damage(self, *, contents: bool = True) -> str | None:
        """Return what is wrong with its files, in words; None where they are as recorded.

        Args:
            contents: whether to read them whole; otherwise only their sizes are compared.
        """
        try:
            files = self.files
        except (OSError, ValueError) as error:
            return f"{self.record.name} cannot be read ({error})"
        for name, (size_bytes, digest) in files.items():
            path = self.folder / name
            try:
                found_bytes = path.stat().st_size
                if found_bytes != size_bytes:
                    return f"{name} has {found_bytes} bytes, expected {size_bytes}"
                if contents and sha256(path) != digest:
                    return f"{name} does not have the contents that were saved"
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        return None

    def paths(self) -> list[Path]:
        """Return its files, the record first: without that it does not count."""
        others = [path for ending in (".", "+") for path in self.folder.glob(f"{self.name}{ending}*")]
        return [self.record, *(path for path in others if path != self.record)]

    def remove(self) -> None:
        """Delete it."""
        for path in self.paths():
            path.unlink(missing_ok=True)


def finished(folder: Path) -> list[Saved]:
    """Return the finished checkpoints of a folder, newest first, whether or not their files are still good."""
    matches = [_RECORD.fullmatch(path.name) for path in folder.glob("ckpt-*.json")]
    return [Saved(folder, step) for step in sorted((int(match[1]) for match in matches if match), reverse=True)]


def newest_good(folder: Path, warn: Callable[[str], None] = print, up_to: int | None = None) -> Saved | None:
    """Return the newest checkpoint whose files are as they were saved; None where there is none.

    Args:
        folder: of the checkpoints.
        warn: called with one line for each newer one that is passed over.
        up_to: the newest step that counts; None: any.
    """
    for saved in finished(folder):
        if up_to is not None and saved.step > up_to:
            continue
        damage = saved.damage()
        if damage is None:
            return saved
        warn(f"warning: checkpoint of step {saved.step} is damaged ({damage}); the one before it is used")
    return None


def agreed(
    folder: Path, everyones: Callable[[int], Sequence[int]], warn: Callable[[str], None] = print
) -> Saved | None:
    """Return the newest checkpoint that is good for every task; None where there is none for any. All tasks call it.

    Args:
        folder: of the checkpoints, as this task sees it.
        everyones: takes a step and returns those that all tasks gave: a collective operation.
        warn: called with one line for each newer one that is damaged.

    Raises:
        RunFailed: some tasks can read a checkpoint and others none. To begin anew would throw away what there is.
    """
    up_to = None
    while True:
        mine = newest_good(folder, warn, up_to)
        steps = everyones(mine.step if mine else NO_CHECKPOINT)
        least = min(steps)
        if least == max(steps):
            return mine
        if least == NO_CHECKPOINT:
            what = f"the checkpoint of step {mine.step} is good" if mine else "no checkpoint is good"
            raise RunFailed(f"{what} for this task, but not for all others; is RUNS_DIR one shared disk?")
        up_to = least


def write(checkpoint: Writer, saved: Saved, generation: int = 0) -> None:
    """Write a checkpoint's files, then the record that makes it count; until then one of the same step stays.

    All is on the disk, not only in its cache, when this returns.

    Args:
        checkpoint: writes TensorFlow's files.
        saved: the name that they shall have.
        generation: of the run; `clean` knows by it what was left behind.
    """
    prefix = _free_prefix(saved)
    with tempfile.TemporaryDirectory(prefix=f".ckpt-{generation}-", dir=saved.folder) as scratch:
        checkpoint.write(f"{scratch}/{prefix}")
        files = {}
        written = [path for path in sorted(Path(scratch).iterdir()) if path.is_file()]
        for path in written:
            sync(path)
            files[path.name] = {"size_bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in written:
            path.replace(saved.folder / path.name)
        sync(saved.folder)
        record = Path(scratch, saved.record.name)  # in there, so that `clean` finds what a kill leaves of it
        write_json(record, {"step": saved.step, "prefix": prefix, "files": files})
        record.replace(saved.record)
    sync(saved.folder)
    for path in saved.paths()[1:]:
        if path.name not in files:
            path.unlink(missing_ok=True)


def _free_prefix(saved: Saved) -> str:
    """Return a prefix that no file has yet."""
    taken = {path.name.partition(".")[0] for path in saved.paths()[1:]}
    names = (f"{saved.name}+{number}" if number else saved.name for number in itertools.count())
    return next(name for name in names if name not in taken)


def prune(newest: Saved, keep: int) -> None:
    """Delete all but the checkpoint just written and, of those before it whose files have their sizes, the newest.

    A newer one is of another copy of this task, which a scheduler has started elsewhere: it stays.

    Args:
        newest: the one just written.
        keep: how many are kept.
    """
    kept = 1
    for saved in finished(newest.folder):
        if saved.step >= newest.step:
            continue
        if kept < keep and saved.damage(contents=False) is None:
            kept += 1
        else:
            saved.remove()


def keep_only(saved: Saved) -> None:
    """Delete every other checkpoint of its folder, also a newer one: which is best may have been evaluated anew."""
    for other in finished(saved.folder):
        if other != saved:
            other.remove()


def clean(folder: Path, generation: int) -> None:
    """Delete what killed saves left: their scratch folders, and files that never got a record. For the writer alone.

    Args:
        folder: of the checkpoints.
        generation: of the run; what a later one writes stays.
    """
    for path in folder.glob(".ckpt-*"):
        match = _SCRATCH.fullmatch(path.name)
        if path.is_dir() and not (match and int(match[1]) >= generation):
            shutil.rmtree(path, ignore_errors=True)
    recorded = {saved.step: saved for saved in finished(folder)}
    for path in folder.glob("ckpt-*"):
        if not (match := _DATA.fullmatch(path.name)):
            continue
        saved = recorded.get(int(match[1]))
        # Of a record that is damaged, or that an older copy of the writer has just deleted, nobody knows.
        with contextlib.suppress(OSError, ValueError):
            if saved is None or path.name not in saved.files:
                path.unlink()


def set_aside(folder: Path, after: int) -> None:
    """Move all checkpoints newer than step `after` out of the way: what is trained from there takes their place.

    Else one that was damaged or abandoned would be the newest again at the next restore. The folder for them holds
    only those of the newest restore.
    """
    newer = [saved for saved in finished(folder) if saved.step > after]
    aside = folder / ASIDE
    if newer:
        shutil.rmtree(aside, ignore_errors=True)
    for saved in newer:
        with contextlib.suppress(OSError):  # no room for another folder: then they are deleted
            aside.mkdir(exist_ok=True)
            for path in saved.paths():
                path.replace(aside / path.name)
        saved.remove()
