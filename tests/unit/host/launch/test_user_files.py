"""`--init-from`: which files hold the weights that a run begins with."""

from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.launch import user_files
from cluster.system import files
from cluster.system.errors import UsageError
from cluster.system.json_files import write_json


@pytest.fixture
def trained(make_run) -> RunFolder:
    run = make_run("trained")
    for step in (5, 10):
        names = [f"ckpt-{step}.index", f"ckpt-{step}.data-00000-of-00001"]
        for name in names:
            (run.checkpoints / name).write_text(name)
        recorded = {name: {"size_bytes": 1, "sha256": files.sha256(run.checkpoints / name)} for name in names}
        write_json(run.checkpoints / f"ckpt-{step}.json", {"step": step, "files": recorded})
    return run


def names(found: tuple[Path, ...]) -> list[str]:
    return [path.name for path in found]


def test_of_a_run_the_newest_checkpoint_is_meant_unless_it_is_damaged(trained):
    assert ["ckpt-10.data-00000-of-00001", "ckpt-10.index"] == names(user_files.find_weights("trained"))
    (trained.checkpoints / "ckpt-10.index").write_text("other")
    assert ["ckpt-5.data-00000-of-00001", "ckpt-5.index"] == names(user_files.find_weights("trained"))
    (trained.checkpoints / "ckpt-5.index").unlink()
    with pytest.raises(UsageError, match="--init-from trained"):
        user_files.find_weights("trained")


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", ["trainde", "absent.npz", "folder/file", "weights.txt"])
def test_what_holds_no_weights_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.txt").touch()
    with pytest.raises(UsageError, match=name):
        user_files.find_weights(name)


def test_files_are_copied_so_that_a_repeated_run_finds_them(trained, make_run):
    prefix = trained.checkpoints / "ckpt-5.index"
    found = user_files.find_weights(str(prefix))
    run = make_run("tuned")
    user_files.copy_weights(found, run.init)
    assert {"ckpt-5.index", "ckpt-5.data-00000-of-00001"} == set(user_files.hash_weights(run.init))
    for path in found:
        path.unlink()
    assert ["ckpt-5.data-00000-of-00001", "ckpt-5.index"] == names(user_files.find_weights(str(prefix), run))
    assert () == user_files.find_weights("")
