"""`invoke clean`: what goes is said and agreed to, and no run in progress is ever deleted."""

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from cluster.contract import spec
from cluster.contract.run import claim
from cluster.contract.run.folder import RunFolder
from cluster.host.control import ending
from cluster.host.launch import folders
from cluster.host.reports import listing
from cluster.system.errors import EXIT_USAGE, UsageError
from cluster.system.json_files import write_json
from tests.support.command_line import exit_code


@pytest.fixture
def old(make_run) -> Callable[..., RunFolder]:

    def make(name: str, days: float = 10) -> RunFolder:
        run = make_run(name, workers=0)
        write_json(run.summary, {"state": "succeeded"})
        moment = time.time() - days * 86400
        for path in [*run.path.rglob("*"), run.path]:
            os.utime(path, (moment, moment))
        return run

    return make


clean = functools.partial(exit_code, "clean")


AGES = {"7d": 604800, "12h": 43200, "30m": 1800, " 2w ": 1209600, "9s": 9}


@pytest.mark.parametrize("text", [*AGES, "", "7", "d", "-1d", "1.5d", "7y", "7d7d", "99999999d"])
def test_an_age_is_a_number_with_its_unit(text):
    with contextlib.nullcontext() if text in AGES else pytest.raises(UsageError, match="--older"):
        assert AGES.get(text) == spec.parse_age(text)


def test_nothing_goes_without_being_agreed_to(old, monkeypatch):
    run = old("one")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert EXIT_USAGE == clean(older="7d")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer, goes in (("no", False), ("", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert 0 == clean(older="7d")
        assert goes is not run.path.exists()


@pytest.mark.parametrize("requested", [{}, {"run": "one", "older": "7d"}])
def test_either_a_run_or_an_age_must_be_given(old, requested):
    run = old("one")
    assert EXIT_USAGE == clean(**requested, yes=True)
    assert run.path.exists()


def test_one_run_is_deleted_by_its_name_and_it_is_said_which(old, capsys):
    gone, stays = old("gone", days=0), old("stays")
    assert 0 == clean(run="gone", yes=True)
    assert (False, True) == (gone.path.exists(), stays.path.exists())
    assert "gone" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["absent", "own", "linked", "../elsewhere", ".current"])
def test_a_folder_that_is_not_a_run_is_not_deleted_by_name(old, tmp_path, name):
    runs_dir = old("one").path.parent
    (runs_dir / "own").mkdir()
    (runs_dir / "own" / "file").touch()
    (runs_dir / ".current").touch()
    (runs_dir / "one").rename(elsewhere := tmp_path / "elsewhere")
    (runs_dir / "linked").symlink_to(elsewhere)
    assert EXIT_USAGE == clean(run=name, yes=True)
    assert 0 == clean(older="0m", yes=True)
    assert (elsewhere / "cluster.json").exists()
    assert (runs_dir / "own").exists()


def test_only_old_runs_go_by_the_end_of_the_run(old):
    reported, copied, young = old("reported"), old("copied"), old("young", days=1)
    (reported.path / "report.html").touch()
    write_json(copied.control / "outcome.json", {"state": "succeeded", "time": time.time() - 10 * 86400})
    copied.summary.touch()
    write_json(young.control / "outcome.json", {"state": "succeeded", "time": time.time() - 86400})
    assert 0 == clean(older="7d", yes=True)
    assert [False, False, True] == [run.path.exists() for run in (reported, copied, young)]


def test_a_run_stays_that_another_command_holds_or_that_is_in_progress(old, monkeypatch):
    run = old("one")
    with claim.hold_claim(run, "resumed"):
        assert 1 == clean(older="7d", yes=True)
    monkeypatch.setattr(ending.teardown, "in_progress", lambda run: True)
    assert EXIT_USAGE == clean(run="one", yes=True)
    assert [] == ending.find_old_runs(run.path.parent, 0)
    assert ["one: run 'one' is in progress again; it stays"] == ending.delete_runs([run])
    assert run.path.exists()


def test_a_folder_that_was_never_completed_is_not_a_run_and_its_name_is_free(old, monkeypatch):
    run = old("one")
    run.unfinished.touch()
    with pytest.raises(UsageError):
        folders.find_run("one")
    folders.check_folder(run, resumes=False, replaces=False)
    assert run.path == folders.free_folder("one").path
    assert [] == listing.list_runs(run.path.parent)
    assert [run] == ending.find_old_runs(run.path.parent, 0)
    with claim.hold_claim(run, "started"):
        monkeypatch.setattr(claim, "_mine", set())  # by another process, which is about to complete it
        with pytest.raises(claim.Taken):
            folders.check_folder(run, resumes=False, replaces=False)
        assert run.path.with_name("one-2") == folders.free_folder("one").path
        assert [] == ending.find_old_runs(run.path.parent, 0)


def test_a_deletion_that_was_interrupted_leaves_a_free_name(old, monkeypatch):
    run = old("one")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.delete()
    assert run.incomplete
    assert 0 == clean(older="0m", yes=True)
    assert not run.path.exists()
