"""The files of checkpoints: no kill, full disk or damage loses a good one, and all tasks take the same."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.recovery import checkpoint_files
from cluster.contract.recovery.checkpoint_files import (
    Saved,
    agree_on_newest,
    delete_leftovers,
    delete_older,
    find_newest_good,
    list_finished,
    set_aside,
    write_checkpoint,
)
from cluster.system.errors import EXIT_FAILED, RunFailed
from cluster.system.json_files import DISK_FULL
from tests.support.waiting import wait_for

SIZE = 100_000


@dataclass
class State:
    """Writes what is saved: files full of one byte."""

    byte: int = 1
    size: int = SIZE

    def __call__(self, prefix: str) -> None:
        Path(prefix + ".index").write_bytes(bytes([self.byte]))
        Path(prefix + ".data-00000-of-00001").write_bytes(bytes([self.byte]) * self.size)


def save(folder: Path, *steps: int, keep: int = 1000) -> None:
    for step in steps:
        write_checkpoint(State(step % 256), Saved(folder, step))
        delete_older(Saved(folder, step), keep)


def steps_of(folder: Path) -> list[int]:
    return [saved.step for saved in list_finished(folder)]


def data(folder: Path, step: int) -> Path:
    return folder / f"ckpt-{step}.data-00000-of-00001"


def cut(folder: Path, step: int) -> None:
    """Damage a checkpoint so that its size says so."""
    data(folder, step).write_bytes(b"short")


def change(folder: Path, step: int) -> None:
    """Damage a checkpoint so that only its contents say so."""
    data(folder, step).write_bytes(bytes(SIZE))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_of_the_same_step_is_good_until_the_new_one_is(tmp_path, monkeypatch):
    saved, write_json = Saved(tmp_path, 5), checkpoint_files.write_json
    seen: list[str | None] = []

    def observed(*given: Any) -> None:
        seen.append(saved.damage())
        write_json(*given)
        seen.append(saved.damage())

    save(tmp_path, 5, 51)
    other = contents(tmp_path)["ckpt-51.index"]
    monkeypatch.setattr(checkpoint_files, "write_json", observed)
    for byte in (7, 8, 9):
        write_checkpoint(State(byte), saved)
        assert bytes([byte]) == Path(saved.prefix + ".index").read_bytes()
        assert 6 == len(contents(tmp_path))
    assert [None] * 6 == seen
    assert other == contents(tmp_path)["ckpt-51.index"]


def test_the_same_step_can_be_saved_again_if_its_record_cannot_be_read(tmp_path):
    save(tmp_path, 5)
    Saved(tmp_path, 5).record.write_text("{}")
    write_checkpoint(State(7), Saved(tmp_path, 5))
    assert find_newest_good(tmp_path) == Saved(tmp_path, 5)
    assert bytes([7]) == Path(Saved(tmp_path, 5).prefix + ".index").read_bytes()
    assert 3 == len(contents(tmp_path))


def test_everything_is_on_the_disk_before_the_record_says_so(tmp_path, monkeypatch):
    """Power may fail at any moment: contents, then names, then the record, then its name."""
    done: list[str] = []
    sync, write_json = checkpoint_files.sync, checkpoint_files.write_json
    monkeypatch.setattr(checkpoint_files, "sync", lambda path: (sync(path), done.append(f"sync {path.name}")))
    monkeypatch.setattr(checkpoint_files, "write_json", lambda *given: (write_json(*given), done.append("record")))
    write_checkpoint(State(), Saved(tmp_path, 5))
    files = ["sync ckpt-5.data-00000-of-00001", "sync ckpt-5.index"]
    assert [*files, f"sync {tmp_path.name}", "record", f"sync {tmp_path.name}"] == done


def test_a_full_disk_does_not_damage_the_good_checkpoint(mount_disk):
    small_disk = mount_disk("400k")
    save(small_disk, 4, 5)
    before = contents(small_disk)
    for step in (5, 6):
        with pytest.raises(OSError) as full:
            write_checkpoint(State(9, size=4 * SIZE), Saved(small_disk, step))
        assert full.value.errno in DISK_FULL
    assert before == contents(small_disk)
    assert [5, 4] == steps_of(small_disk)


def write_until_killed(folder: Path, generation: int) -> None:
    delete_leftovers(folder, generation)
    step = max(steps_of(folder), default=0)
    while True:
        step += 1
        write_checkpoint(State(step % 256, size=20 * SIZE), Saved(folder, step), generation)
        delete_older(Saved(folder, step), 1)


def test_a_kill_at_any_moment_leaves_a_good_checkpoint_and_no_leftovers(tmp_path):
    """With one checkpoint kept: writing, switching and pruning are all cut short somewhere."""
    random_, last = random.Random(4), 0
    for generation in range(6):
        if not (writer := os.fork()):
            try:
                write_until_killed(tmp_path, generation)
            finally:
                os._exit(1)
        wait_for(lambda before=last: max(steps_of(tmp_path), default=0) > before, "a checkpoint")
        time.sleep(random_.uniform(0, 0.05))  # the moment of the kill is what is drawn
        os.kill(writer, signal.SIGKILL)
        assert signal.SIGKILL == os.WTERMSIG(os.waitpid(writer, 0)[1])
        good = find_newest_good(tmp_path, pytest.fail)
        assert good is not None
        last = good.step
    delete_leftovers(tmp_path, 6)
    newest = Saved(tmp_path, last)
    delete_older(newest, 1)
    assert sorted(path.name for path in newest.paths()) == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_just_written_is_always_kept(tmp_path, keep):
    save(tmp_path, 5, 90, 100)
    cut(tmp_path, 100)
    save(tmp_path, 10, keep=keep)
    assert [100, 90, 10, 5][: 2 + keep] == steps_of(tmp_path)


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    save(tmp_path, 1, 2, 3)
    cut(tmp_path, 3)
    Saved(tmp_path, 2).record.write_text("")
    save(tmp_path, 4, keep=2)
    assert [4, 1] == steps_of(tmp_path)


def test_only_leftovers_of_killed_saves_are_deleted(tmp_path):
    save(tmp_path, 4, 5)
    Saved(tmp_path, 4).record.write_text("{")
    kept = contents(tmp_path)
    for name in (".ckpt-0-abc", ".ckpt-2-def", ".ckpt-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ckpt-6.index").write_bytes(b"x")
    for name in ("ckpt-6.index", "ckpt-6.data-00000-of-00001"):  # the record never came
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "ckpt-5+1.index").write_bytes(b"x")  # of a second save
    (tmp_path / ".ckpt-3-mine").mkdir()
    (tmp_path / "notes.txt").write_bytes(b"the user's")
    delete_leftovers(tmp_path, 3)
    assert kept | {"notes.txt": b"the user's"} == contents(tmp_path)
    assert (tmp_path / ".ckpt-3-mine").is_dir()


def test_cleaning_survives_a_concurrent_deletion(tmp_path, monkeypatch):
    save(tmp_path, 4, 5)

    def listed(folder: Path) -> list[Saved]:
        found = list_finished(folder)
        Saved(folder, 4).record.unlink()  # first of its files
        return found

    monkeypatch.setattr(checkpoint_files, "list_finished", listed)
    delete_leftovers(tmp_path, 3)
    assert [5] == steps_of(tmp_path)


def test_skipped_checkpoints_are_set_aside_and_never_restored(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    cut(tmp_path, 4)
    set_aside(tmp_path, 2)
    assert [2, 1] == steps_of(tmp_path)
    assert [4, 3] == steps_of(tmp_path / "aside")
    save(tmp_path, 5)
    set_aside(tmp_path, 5)  # nothing is newer: what lies there stays
    assert [4, 3] == steps_of(tmp_path / "aside")
    set_aside(tmp_path, 2)
    assert [5] == steps_of(tmp_path / "aside")
    assert Saved(tmp_path / "aside", 5).damage() is None


def agree(*folders: Path) -> list[int | RunFailed | None]:
    """Return the checkpoint on which tasks with these folders agree; each runs as if the others existed."""
    views = [[saved.step for saved in list_finished(folder) if saved.damage() is None] for folder in folders]

    def of(folder: Path) -> int | RunFailed | None:
        bound: list[int | None] = [None]

        def everyones(step: int) -> list[int]:
            given = [max((s for s in view if bound[0] is None or s <= bound[0]), default=-1) for view in views]
            assert step in given
            bound[0] = min(given)
            return given

        try:
            saved = agree_on_newest(folder, everyones, lambda words: None)
        except RunFailed as error:
            return error
        return saved and saved.step

    return [of(folder) for folder in folders]


@pytest.fixture
def views(tmp_path) -> list[Path]:
    """The same folder as three tasks see it: each its own copy."""
    folders = [tmp_path / f"task-{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
        save(folder, 10, 20, 30)
    return folders


def test_the_newest_that_is_good_for_all_is_taken(views):
    change(views[0], 30)
    Saved(views[1], 20).record.unlink()
    assert [10] * 3 == agree(*views)


def test_if_no_task_has_a_good_checkpoint_training_starts_over(views):
    for folder in views:
        for step in (10, 20, 30):
            change(folder, step)
    assert [None] * 3 == agree(*views)


@pytest.mark.parametrize("seen", [(), (10,)])
def test_a_task_that_can_read_none_of_the_others_ends_the_run(views, seen):
    """Starting over would discard the others' checkpoints: this task's disk is another one, or broken."""
    for step in (10, 20, 30):
        Saved(views[2], step).remove()
    for step in seen:
        save(views[2], step)
        change(views[2], step)
    assert [EXIT_FAILED] * 3 == [error.exit_code for error in agree(*views) if isinstance(error, RunFailed)]
    assert [30, 20, 10] == steps_of(views[0])


def test_a_malformed_record_counts_as_damage(tmp_path):
    save(tmp_path, 1)
    for text in ("", "[]", "{}", '{"files": []}', '{"files": {"ckpt-1.index": 5}}', "\0" * 100):
        Saved(tmp_path, 1).record.write_text(text)
        assert Saved(tmp_path, 1).damage()
        assert Saved(tmp_path, 1).damage(contents=False)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut, "ckpt-3.data-00000-of-00001 has "),
        (change, "ckpt-3.data-00000-of-00001 has changed"),
        (lambda folder, step: (folder / f"ckpt-{step}.index").unlink(), "ckpt-3.index is missing"),
        (lambda folder, step: Saved(folder, step).record.write_text("{}"), "ckpt-3.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, damage, named):
    save(tmp_path, 2, 3)
    damage(tmp_path, 3)
    warnings: list[str] = []
    assert Saved(tmp_path, 2) == find_newest_good(tmp_path, warnings.append)
    (warning,) = warnings
    assert warning.startswith("warning: checkpoint of step 3 is damaged (")
    assert named in warning
