"""What git says of the checkout that runs."""

import os
import subprocess
from pathlib import Path

import pytest

from cluster.host.image import checkout

pytestmark = pytest.mark.needs("git")
GIT = ["git", "-c", "user.name=a test", "-c", "user.email=test@example.invalid"]
CODE = ("cluster", "train")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


@pytest.fixture
def committed(folder) -> Path:
    """A checkout of one commit, made a day after 1970 began; returns its only file."""
    file = folder / "train" / "code.py"
    file.parent.mkdir()
    file.write_text("1")
    dated = os.environ | {"GIT_COMMITTER_DATE": "@86400 +0000"}
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=one"]):
        subprocess.run([*GIT, "-C", str(folder), *words], env=dated, check=True)
    return file


def test_the_commit_and_its_time_are_reported_and_whether_files_differ(committed, monkeypatch):
    commit = checkout.commit()
    assert (40, commit, 86400) == (len(commit), checkout.revision(), checkout.commit_time_s())
    committed.write_text("2")
    assert (commit, f"{commit}-dirty", 86400) == (checkout.commit(), checkout.revision(), checkout.commit_time_s())
    assert (commit, f"{commit}-dirty") == (checkout.revision("train"), checkout.revision("train/other.py"))
    with monkeypatch.context() as patch:
        patch.setattr(checkout, "ROOT", committed.parent)  # an installed copy, below a repository of the user's
        assert ("", "", 0) == (checkout.commit(), checkout.revision(), checkout.commit_time_s())
    monkeypatch.setenv("PATH", "")  # without git
    assert ("", "", 0) == (checkout.commit(), checkout.revision(), checkout.commit_time_s())


def test_what_differs_from_the_commit_is_reported_by_a_hash(folder, committed):
    clean = checkout.commit()
    (folder / "README.md").write_text("about")
    subprocess.run([*GIT, "-C", str(folder), "add", "README.md"], check=True)
    (folder / "train" / ".#code.py").symlink_to("user@host.1:2")  # an editor's lock
    assert checkout.changes_sha256(*CODE) is None  # of the named folders
    assert checkout.revision().endswith("-dirty")
    committed.write_text("2")
    changed = checkout.changes_sha256(*CODE)
    (folder / "notes.txt").write_text("nobody's business")
    assert changed == checkout.changes_sha256(*CODE)
    (folder / "train" / "new.py").write_text("3")
    assert 3 == len({None, changed, checkout.changes_sha256(*CODE)})
    assert clean == checkout.commit()
