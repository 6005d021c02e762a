"""Checkpoint files: neither a kill nor a full disk can damage a finished checkpoint, and each is checked before use.

    checkpoints/ckpt-200.index  ckpt-200.data-00000-of-00001   TensorFlow's own files
    checkpoints/ckpt-200.json                                  their names, sizes and sha256; written last
    checkpoints/ckpt-200+1.index                               a second save of the same step, see `write_checkpoint`
    checkpoints/.ckpt-<generation>-*                           incomplete files of a save
    checkpoints/aside/                                         checkpoints that the newest restore skipped

A checkpoint without its JSON file, the record, is unfinished and does not count. Only the chief writes; all tasks read.
This module does not import TensorFlow.
"""

import contextlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.system.errors import RunFailed
from cluster.system.files import sha256, sync
from cluster.system.json_files import DamagedError, read_json, write_json

ASIDE = "aside"
NO_CHECKPOINT = -1
_RECORD = re.compile(r"ckpt-(\d+)\.json")
_DATA = re.compile(r"ckpt-(\d+)(?:\+\d+)?\.(?:index|data-.*)")
_SCRATCH = re.compile(r"\.ckpt-(\d+)-.*")


@dataclass(frozen=True)
class Saved:
    """A finished checkpoint."""

    folder: Path
    step: int

    @property
    def name(self) -> str:
        """The common prefix of the file names; a number after it marks another save of the same step."""
        return f"ckpt-{self.step}"

    @property
    def prefix(self) -> str:
        """The prefix from which TensorFlow restores the checkpoint."""
        return str(self.folder / read_json(self.record).get("prefix", self.name))

    @property
    def record(self) -> Path:
        """The JSON file that marks the checkpoint as finished."""
        return self.folder / f"{self.name}.json"

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """The size in bytes and the sha256 of each file, according to the record."""
        try:
            return {
                name: (file["size_bytes"], file["sha256"]) for name, file in read_json(self.record)["files"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedError(self.record, f"{type(error).__name__}: {error}") from error

    def damage(self, *, contents: bool = True) -> str | None:
        """Describe the damage to the files; None if intact. Without `contents`, only compare their sizes."""
        try:
            files = self.files
        except (OSError, ValueError) as error:
            return f"{self.record.name} cannot be read ({error})"
        for name, (size_bytes, digest) in files.items():
            path = self.folder / name
            try:
                if (actual_bytes := path.stat().st_size) != size_bytes:
                    return f"{name} has {actual_bytes} bytes, expected {size_bytes}"
                if contents and sha256(path) != digest:
                    return f"{name} has changed since it was saved"
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        return None

    def paths(self) -> list[Path]:
        """Return the checkpoint's files, beginning with the record, which marks the checkpoint as finished."""
        others = [path for ending in (".", "+") for path in self.folder.glob(f"{self.name}{ending}*")]
        return [self.record, *(path for path in others if path != self.record)]

    def remove(self) -> None:
        for path in self.paths():
            path.unlink(missing_ok=True)


def list_finished(folder: Path) -> list[Saved]:
    """Return the finished checkpoints of a folder, newest first, including damaged ones."""
    matches = [_RECORD.fullmatch(path.name) for path in folder.glob("ckpt-*.json")]
    return [Saved(folder, step) for step in sorted((int(match[1]) for match in matches if match), reverse=True)]


def find_newest_good(folder: Path, warn: Callable[[str], None] = print, up_to: int | None = None) -> Saved | None:
    """Return the newest intact checkpoint up to step `up_to`, or None; call `warn` for each newer, damaged one."""
    for saved in list_finished(folder):
        if up_to is not None and saved.step > up_to:
            continue
        if (damage := saved.damage()) is None:
            return saved
        warn(f"warning: checkpoint of step {saved.step} is damaged ({damage}) and is skipped")
    return None


def agree_on_newest(
    folder: Path, gather: Callable[[int], Sequence[int]], warn: Callable[[str], None] = print
) -> Saved | None:
    """Return the newest checkpoint that is intact for every task; None if no task has one. All tasks must call it.

    `gather` is a collective operation that returns the numbers of all tasks; `warn` is called for each damaged, newer
    checkpoint. Raises RunFailed if only some tasks can read a checkpoint: starting over would discard it.
    """
    up_to = None
    while True:
        mine = find_newest_good(folder, warn, up_to)
        steps = gather(mine.step if mine else NO_CHECKPOINT)
        least = min(steps)
        if least == max(steps):
            return mine
        if least == NO_CHECKPOINT:
            state = f"the checkpoint of step {mine.step} is good" if mine else "no checkpoint is good"
            raise RunFailed(f"{state} for this task, but not for all others; is RUNS_DIR one shared disk?")
        up_to = least


def write_checkpoint(write: Callable[[str], object], saved: Saved, generation: int = 0) -> None:
    """Write a checkpoint's files and then its record; until then an earlier save of the same step remains valid.

    All files have been flushed to the disk when this returns. `write` writes TensorFlow's files with a given prefix,
    like `tf.train.Checkpoint.write`. `delete_leftovers` recognizes leftovers by the run's `generation`.
    """
    taken = {path.name.partition(".")[0] for path in saved.paths()[1:]}
    names = (f"{saved.name}+{number}" if number else saved.name for number in itertools.count())
    prefix = next(name for name in names if name not in taken)
    with tempfile.TemporaryDirectory(prefix=f".ckpt-{generation}-", dir=saved.folder) as scratch:
        write(f"{scratch}/{prefix}")
        files = {}
        written = [path for path in sorted(Path(scratch).iterdir()) if path.is_file()]
        for path in written:
            sync(path)
            files[path.name] = {"size_bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in written:
            path.replace(saved.folder / path.name)
        sync(saved.folder)
        record = Path(scratch, saved.record.name)  # a folder that `delete_leftovers` removes after a kill
        write_json(record, {"step": saved.step, "prefix": prefix, "files": files})
        record.replace(saved.record)
    sync(saved.folder)
    for path in saved.paths()[1:]:
        if path.name not in files:
            path.unlink(missing_ok=True)


def delete_older(newest: Saved, keep: int) -> None:
    """Delete old checkpoints: keep the one just written, and the newest earlier ones, `keep` in total.

    Checkpoints with files of the wrong size are deleted, too. Newer ones belong to another copy of this task, which a
    scheduler has started elsewhere, and remain.
    """
    kept = 1
    for saved in list_finished(newest.folder):
        if saved.step >= newest.step:
            continue
        if kept < keep and saved.damage(contents=False) is None:
            kept += 1
        else:
            saved.remove()


def delete_leftovers(folder: Path, generation: int) -> None:
    """Delete leftovers of killed saves: files without a record, and temporary folders of earlier generations.

    Only the task that writes checkpoints may call it.
    """
    for path in folder.glob(".ckpt-*"):
        match = _SCRATCH.fullmatch(path.name)
        if path.is_dir() and not (match and int(match[1]) >= generation):
            shutil.rmtree(path, ignore_errors=True)
    recorded = {saved.step: saved for saved in list_finished(folder)}
    for path in folder.glob("ckpt-*"):
        if not (match := _DATA.fullmatch(path.name)):
            continue
        saved = recorded.get(int(match[1]))
        # A record may be damaged, or an older copy of the writer may just have deleted it.
        with contextlib.suppress(OSError, ValueError):
            if saved is None or path.name not in saved.files:
                path.unlink()


def set_aside(folder: Path, after: int) -> None:
    """Move all checkpoints after step `after` to a separate folder, which keeps only those of the latest call.

    Otherwise a damaged or abandoned checkpoint would be the newest again at the next restore.
    """
    newer = [saved for saved in list_finished(folder) if saved.step > after]
    aside = folder / ASIDE
    if newer:
        shutil.rmtree(aside, ignore_errors=True)
    for saved in newer:
        with contextlib.suppress(OSError):  # without space for the folder, delete the files instead
            aside.mkdir(exist_ok=True)
            for path in saved.paths():
                path.replace(aside / path.name)
        saved.remove()
