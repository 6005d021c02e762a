"""What tasks bring along: where it lies, what is refused, the folders that scripts run in, and initial weights."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import configuration, planning, startup, user_files
from cluster.host.options.request import Request
from cluster.host.runtime import compose_runtime
from cluster.host.runtime.payload import Payload, container_variables
from cluster.system import files
from cluster.system.errors import PrerequisiteError, UsageError
from cluster.system.json_files import read_json, write_json
from tests.support.launching import CONFIG, WORKING_ENGINE, refusal

ALL = Payload(Path("/theirs/s.py"), ("1",), (Path("/code/a"), Path("/b")), Path("/r.txt"), Path("/packages/of/it"))


@pytest.fixture
def environment(monkeypatch):
    """Nothing in the caller's environment that changes what tasks get."""
    for name in os.environ:
        if name != "PATH":
            monkeypatch.delenv(name)


def test_a_container_finds_everything_under_fixed_names_and_a_local_process_where_it_lies(environment, monkeypatch):
    assert ["--script", "/script/s.py", "1"] == ALL.mounted().command()
    expected = [("/code/a", "/code/0"), ("/b", "/code/1"), ("/packages/of/it", "/packages"), ("/theirs", "/script")]
    assert expected == [(str(source), target) for source, target in ALL.mounts()]
    assert ["/code/0", "/code/1", "/packages"] == ALL.mounted().path
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
        ("theirs/s.py", ""),
    ],
)
def test_a_script_that_cannot_be_run_is_refused(tmp_path, monkeypatch, name, why):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("s.py", "runs/one/work/chief/s.py", "theirs/s.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    if not why:  # it is found from where the caller is
        assert tmp_path / name == user_files.check_script(name, tmp_path / "runs")
        return
    with pytest.raises(UsageError, match=why):
        user_files.check_script(str(tmp_path / name), tmp_path / "runs")


def test_what_containers_could_not_read_is_reported(theirs, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    compose_runtime.check_readable(Payload(theirs))
    for path, closed, opened in ((theirs.parent, 0o700, 0o755), (theirs, 0o600, 0o644)):
        path.chmod(closed)
        with pytest.raises(PrerequisiteError, match=rf"run as user 10001:10001, who cannot read {path}: `chmod -R o"):
            compose_runtime.check_readable(Payload(theirs))
        monkeypatch.setattr(os, "getuid", lambda: 1000)  # they then run as the caller
        compose_runtime.check_readable(Payload(theirs))
        monkeypatch.setattr(os, "getuid", lambda: 0)
        path.chmod(opened)


def test_every_task_works_in_a_folder_of_links(run, theirs):
    (theirs.parent / "data").mkdir()
    for seen_at in ("/script", str(theirs.parent)):
        user_files.lay_out(theirs, run, run.load_cluster(), Path(seen_at))
        for task in ("chief", "worker-0"):
            links = {path.name: str(path.readlink()) for path in run.work(task).iterdir()}
            assert {name: f"{seen_at}/{name}" for name in ("data", "fit.py", "table.csv")} == links


def test_what_an_earlier_life_wrote_stays(make_run, theirs):
    (theirs.parent / "model").mkdir()
    run = make_run(workers=0)
    run.work("chief").mkdir(parents=True)
    (run.work("chief") / "model").write_text("trained")
    user_files.lay_out(theirs, run, run.load_cluster(), theirs.parent)
    assert "trained" == (run.work("chief") / "model").read_text()


def test_no_link_leads_back_to_the_run(make_run, tmp_path):
    (tmp_path / "s.py").touch()  # next to runs/, as in this checkout
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "again").symlink_to("runs")
    run = make_run(workers=0)
    user_files.lay_out(tmp_path / "s.py", run, run.load_cluster(), tmp_path)
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
@pytest.mark.parametrize("name", ["trainde", "absent.npz", "folder/file", "weights.txt", "~nobody-here/w.npz"])
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
    assert {"ckpt-5.index", "ckpt-5.data-00000-of-00001"} == {path.name for path in run.init.iterdir()}
    for path in found:
        path.unlink()
    assert ["ckpt-5.data-00000-of-00001", "ckpt-5.index"] == names_of(user_files.find_weights(str(prefix), run))
    assert () == user_files.find_weights("")


LOCAL = {"runtime": "local", "tensorboard_port": "0"}


@pytest.mark.parametrize(("separate", "expected"), [(False, ["worker"]), (True, ["chief", "worker"])])
def test_a_script_sees_workers_alone_unless_it_asks_for_a_chief(theirs, stopped_run, separate, expected):
    requested = Request(script=str(theirs), workers=1, separate_chief=separate, runtime="local")
    stopped_run(script=str(theirs), workers=1, separate_chief=separate, name="led")
    for plan in (planning.plan(requested), planning.plan(Request(resume="led", **LOCAL))):
        tasks = plan.compose["tasks"]
        assert ["chief", "worker-0"] == list(tasks)
        seen = [json.loads(task["environment"]["TF_CONFIG"]) for task in tasks.values()]
        assert [expected, expected] == [list(each["cluster"]) for each in seen]
        assert seen == [task["tf_config"] for task in plan.to_json()["tasks"]]


def test_a_script_needs_no_data_and_gets_a_folder_to_work_in(theirs, stopped_run, tmp_path):
    requested = {"script": str(theirs), "workers": 1, "overrides": ("-n", "a b")}
    planned = planning.plan(Request(**requested, **LOCAL))
    assert planned.run.name.startswith("fit-")
    assert planned.network.warning in planned.notes
    assert [] == [line for line in startup.list_commands(planned) if "train.data" in line]
    run = stopped_run(**requested)
    expected = {"script": str(theirs), "arguments": ["-n", "a b"], "separate_chief": False}
    assert expected == run.script == read_json(run.config)
    assert (tmp_path / "data").is_dir()
    assert theirs.parent / "table.csv" == (run.work("worker-0") / "table.csv").readlink()
    for task in read_json(run.compose)["tasks"].values():
        assert ["-m", "cluster.agent", "--script", str(theirs), "-n", "a b"] == task["command"][1:]
    value = planned.to_json()
    assert (None, None) == (value["global_batch"], value["replica_batch"])


def test_a_script_s_run_continues_with_its_script(theirs, stopped_run):
    run = stopped_run(script=str(theirs), name="one", workers=1, overrides=("7",))
    plan = planning.plan(Request(resume="one", **LOCAL))
    assert (theirs, ("7",), 2) == (plan.payload.script, plan.payload.arguments, len(plan.cluster.tasks))
    assert ("8",) == planning.plan(Request(resume="one", runtime="local", overrides=("8",))).payload.arguments
    assert "--preset" in str(refusal(Request(resume="one", preset="mnist")))
    stopped_run(resume="one")
    assert 1 == run.generation


def test_the_user_s_modules_are_mounted_and_on_the_path(docker, monkeypatch, tmp_path):
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (dict(CONFIG), (tmp_path / "mine",), ""))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    planned = planning.plan(Request(preset="mine.presets:small", workers=1, runtime="local"))
    assert planned.run.name.startswith("mine.presets-small-")
    path = f"{tmp_path}/mine"
    assert path == planned.compose["tasks"]["chief"]["environment"]["PYTHONPATH"]
    prepare = [f"PYTHONPATH={path}", f"CALLED_IN={Path.cwd()}", sys.executable, "-m", "train.data", "prepare"]
    assert prepare == shlex.split(startup.list_commands(planned)[0])[:6]
    assert f"PYTHONPATH={Path.cwd()}:{path} " in startup.data_command("prepare", "mine:data")
    docker(WORKING_ENGINE)
    task = planning.plan(Request(preset="mine.presets:small", workers=1)).compose["services"]["chief"]
    assert "/code/0" == task["environment"]["PYTHONPATH"]
    assert {"type": "bind", "source": f"{tmp_path}/mine", "target": "/code/0", "read_only": True} in task["volumes"]
    assert "networks" not in task


def test_the_caller_s_modules_are_found_where_the_caller_is(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, name in ((here, "presets_here"), (there, "presets_there")):
        folder.mkdir()
        text = "from train.config import TrainConfig\n\n\ndef small():\n    return TrainConfig(global_batch=6)\n"
        (folder / f"{name}.py").write_text(text)
        (folder / "train.py").write_text("raise SystemExit('this is not the training program')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", "../there")
    for folder, name in ((here, "presets_here"), (there, "presets_there")):
        planned = planning.plan(Request(preset=f"{name}:small", runtime="local"))
        assert (6, (folder,)) == (planned.config["global_batch"], planned.payload.code_dirs)
    (here / "broken.py").write_text("def small():\n    return 1 / 0\n")
    assert "broken.py:2" in str(refusal(Request(preset="broken:small", runtime="local")))


def test_a_resumed_run_finds_its_modules_where_they_were_unless_they_are_gone(tmp_path, monkeypatch, stopped_run):
    folder, other, third = (tmp_path / name for name in ("model", "other", "third"))
    for each in (folder, other, third):
        each.mkdir()
        (each / "own_cnn.py").write_text("def build(shape, outputs):\n    raise NotImplementedError\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(configuration, "check_config", lambda *_, **__: {})
    stopped_run(name="one", overrides=("--model", "own_cnn:build", "--no-deterministic"), workers=0)
    monkeypatch.chdir(other)  # of another project, with a module of the same name
    assert (folder,) == planning.plan(Request(resume="one", **LOCAL)).payload.code_dirs
    named = Request(resume="one", code_dir=str(third), **LOCAL)  # as by its --file
    assert (third,) == planning.plan(named).payload.code_dirs
    folder.rename(tmp_path / "moved")
    assert (other,) == planning.plan(Request(resume="one", **LOCAL)).payload.code_dirs


def test_extra_packages_are_got_before_anything_is_started(
    resolved, theirs, monkeypatch, tmp_path, docker, stopped_run
):
    requested = []

    def prepare(requirements: Path, python: str) -> Path:
        requested.append((requirements, python))
        (tmp_path / "kept").mkdir(exist_ok=True)
        (tmp_path / "kept" / "requirements.txt").write_text("resolved\n")
        return tmp_path / "kept"

    monkeypatch.setattr(planning.user_files, "install_packages", prepare)
    (tmp_path / "r.txt").touch()
    for name, options in (("scripted", {"script": str(theirs)}), ("ours", {})):
        run = stopped_run(name=name, requirements=str(tmp_path / "r.txt"), workers=0, **options)
        assert str(tmp_path / "kept") == read_json(run.compose)["tasks"]["chief"]["environment"]["PYTHONPATH"]
        assert "resolved\n" == (run.path / "requirements.txt").read_text()
        assert tmp_path / "kept" == planning.plan(Request(resume=name, runtime="local")).payload.packages
    assert {(tmp_path / "r.txt", planning.registry.LOCAL.python)} == set(requested)
    docker(WORKING_ENGINE)
    planning.plan(Request(script=str(theirs), requirements=str(tmp_path / "r.txt")))
    assert (tmp_path / "r.txt", "3.11") == requested[-1]
