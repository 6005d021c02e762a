"""What tasks bring along: where it lies, what is refused, the folders that scripts run in, and initial weights."""

import os
from pathlib import Path

import pytest

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import user_files
from cluster.host.runtime import compose_services
from cluster.host.runtime.payload import Payload, container_variables
from cluster.system import files
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import write_json

ALL = Payload(Path("/theirs/s.py"), ("1",), (Path("/code/a"), Path("/b")), Path("/r.txt"), Path("/packages/of/it"))


@pytest.fixture
def environment(monkeypatch):
    """Nothing in the caller's environment that changes what tasks get."""
    for name in os.environ:
        if name != "PATH":
            monkeypatch.delenv(name)


def test_a_container_finds_everything_under_fixed_names():
    assert ["--script", "/script/s.py", "1"] == ALL.mounted().command()
    expected = [("/code/a", "/code/0"), ("/b", "/code/1"), ("/packages/of/it", "/packages"), ("/theirs", "/script")]
    assert expected == [(str(source), target) for source, target in ALL.mounts()]
    assert ["/code/0", "/code/1", "/packages"] == ALL.mounted().path


def test_a_local_process_finds_everything_where_it_lies(environment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/callers")
    assert ["--script", "/theirs/s.py", "1"] == ALL.command()
    path = ALL.environment(spec.build(2), ALL.local_path())["PYTHONPATH"]
    assert "/code/a:/b:/packages/of/it:/callers" == path


def test_tf_keras_is_for_parameter_servers_unless_the_caller_chooses(environment, monkeypatch):
    for ps, expected in ((0, None), (1, "1")):
        assert expected == ALL.environment(spec.build(2, ps), ALL.local_path()).get("TF_USE_LEGACY_KERAS")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    assert "TF_USE_LEGACY_KERAS" not in ALL.environment(spec.build(2, 1), ALL.local_path())  # inherited
    assert container_variables(way_out=True)["TF_USE_LEGACY_KERAS"] is None  # passed on


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("s.py", "home folder"),
        ("runs/one/work/chief/s.py", "folder of the runs"),
        ("runs/s.py", "folder of the runs"),
        ("theirs/s.py", ""),
    ],
)
def test_a_script_that_cannot_be_run_is_refused(tmp_path, monkeypatch, name, why):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("s.py", "runs/s.py", "runs/one/work/chief/s.py", "theirs/s.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    if not why:  # it is found from where the caller is
        assert tmp_path / name == user_files.check_script(name, tmp_path / "runs")
        return
    with pytest.raises(UsageError, match=why):
        user_files.check_script(str(tmp_path / name), tmp_path / "runs")


def test_what_containers_could_not_read_is_reported(tmp_path, monkeypatch):
    script = tmp_path / "theirs" / "s.py"
    script.parent.mkdir()
    script.touch()
    script.parent.chmod(0o755)
    script.chmod(0o644)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    compose_services.check_readable(Payload(script))
    for path, closed, opened in ((script.parent, 0o700, 0o755), (script, 0o600, 0o644)):
        path.chmod(closed)
        with pytest.raises(PrerequisiteError, match=rf"run as user 10001:10001, who cannot read {path}: `chmod -R o"):
            compose_services.check_readable(Payload(script))
        monkeypatch.setattr(os, "getuid", lambda: 1000)  # they then run as the caller
        compose_services.check_readable(Payload(script))
        monkeypatch.setattr(os, "getuid", lambda: 0)
        path.chmod(opened)


def test_every_task_works_in_a_folder_of_links(run, tmp_path):
    folder = tmp_path / "theirs"
    (folder / "data").mkdir(parents=True)
    (folder / "s.py").touch()
    for seen_at in ("/script", str(folder)):
        user_files.lay_out(Payload(folder / "s.py"), run, run.load_cluster(), seen_at=Path(seen_at))
        for task in ("chief", "worker-0"):
            links = {path.name: str(path.readlink()) for path in run.work(task).iterdir()}
            assert {"data": f"{seen_at}/data", "s.py": f"{seen_at}/s.py"} == links


def test_what_an_earlier_life_wrote_stays(make_run, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model").mkdir()
    (tmp_path / "theirs" / "s.py").touch()
    run = make_run(workers=0)
    run.work("chief").mkdir(parents=True)
    (run.work("chief") / "model").write_text("trained")
    user_files.lay_out(Payload(tmp_path / "theirs" / "s.py"), run, run.load_cluster())
    assert "trained" == (run.work("chief") / "model").read_text()
    user_files.lay_out(Payload(), other := make_run("other", workers=0), other.load_cluster())
    assert not (other.path / "work").exists()


def test_no_link_leads_back_to_the_run(make_run, tmp_path):
    (tmp_path / "s.py").touch()  # next to runs/, as in this checkout
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "again").symlink_to("runs")
    run = make_run(workers=0)
    user_files.lay_out(Payload(tmp_path / "s.py"), run, run.load_cluster())
    assert {"s.py", "loop"} == {path.name for path in run.work("chief").iterdir()}
    assert all(len(Path(folder).parts) < 20 for folder, _, _ in os.walk(run.path, followlinks=True))


@pytest.fixture
def trained(make_run) -> RunFolder:
    run = make_run("trained")
    for step in (5, 10):
        names = [f"ckpt-{step}.index", f"ckpt-{step}.data-00000-of-00001"]
        for name in names:
            (run.checkpoints / name).write_text(name)
        recorded = {name: {"size_bytes": len(name), "sha256": files.sha256(run.checkpoints / name)} for name in names}
        write_json(run.checkpoints / f"ckpt-{step}.json", {"step": step, "files": recorded})
    return run


def names_of(found: tuple[Path, ...]) -> list[str]:
    return [path.name for path in found]


def test_of_a_run_the_newest_checkpoint_is_meant_unless_it_is_damaged(trained):
    assert ["ckpt-10.data-00000-of-00001", "ckpt-10.index"] == names_of(user_files.find_weights("trained"))
    (trained.checkpoints / "ckpt-10.index").write_text("other")
    assert ["ckpt-5.data-00000-of-00001", "ckpt-5.index"] == names_of(user_files.find_weights("trained"))
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
    assert ["ckpt-5.data-00000-of-00001", "ckpt-5.index"] == names_of(user_files.find_weights(str(prefix), run))
    assert () == user_files.find_weights("")
