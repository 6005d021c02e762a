"""Runs of a script, of modules and with user packages: the commands and environments of their tasks."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from cluster.host.launch import configuration, planning, startup
from cluster.host.options.request import Request
from cluster.system.json_files import read_json, write_json
from tests.support.launching import CONFIG, WORKING_ENGINE, refusal

LOCAL = {"runtime": "local", "tensorboard_port": "0"}


@pytest.fixture
def theirs(tmp_path) -> Path:
    """Somebody's script, in a folder that everybody may read."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "fit.py").touch()
    (folder / "table.csv").touch()
    return folder / "fit.py"


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


def test_a_script_s_run_goes_on_with_its_script_and_bounds(theirs, stopped_run):
    bounds = {"hang_timeout": 600, "max_restarts": 0, "max_external_restarts": 7}
    run = stopped_run(script=str(theirs), name="one", workers=1, overrides=("7",), **bounds)
    plan = planning.plan(Request(resume="one", **LOCAL))
    assert (theirs, ("7",), 2) == (plan.payload.script, plan.payload.arguments, len(plan.cluster.tasks))
    assert ("8",) == planning.plan(Request(resume="one", runtime="local", overrides=("8",))).payload.arguments
    assert "--preset" in str(refusal(Request(resume="one", preset="mnist")))
    stopped_run(resume="one")
    assert 1 == run.generation

    def resumed(**options: str) -> tuple[int, int, int]:
        plan = planning.plan(Request(resume="one", **LOCAL, **options, trust=True))
        return tuple(plan.options.count(name) for name in ("hang_timeout", "max_restarts", "max_external_restarts"))

    assert (600, 0, 7) == resumed()
    assert (30, 5, 9) == resumed(hang_timeout=30, max_restarts=5, max_external_restarts=9)
    path = run.control / "started.json"
    write_json(path, read_json(path) | {"hang_timeout_s": 0})  # of a run that an earlier version debugged
    assert (60, 0, 7) == resumed()


def test_modules_of_one_s_own_are_mounted_and_on_the_path(docker, monkeypatch, tmp_path):
    monkeypatch.setattr(configuration, "resolve_config", lambda *_: (dict(CONFIG), (tmp_path / "mine",), ""))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    requested = Request(preset="mine.presets:small", workers=1, runtime="local")
    planned = planning.plan(requested)
    assert planned.run.name.startswith("mine.presets-small-")
    path = f"{tmp_path}/mine"
    assert path == planned.compose["tasks"]["chief"]["environment"]["PYTHONPATH"]
    prepare = [f"PYTHONPATH={path}", sys.executable, "-m", "train.data", "prepare"]
    assert prepare == shlex.split(startup.list_commands(planned)[0])[:5]
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


def test_a_resumed_run_finds_its_modules_where_they_were(tmp_path, monkeypatch, stopped_run):
    (folder := tmp_path / "model").mkdir()
    (folder / "own_cnn.py").write_text("def build(shape, outputs):\n    raise NotImplementedError\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(configuration, "check_config", lambda *_, **__: {})
    stopped_run(name="one", overrides=("--model", "own_cnn:build", "--no-deterministic"), workers=0)
    monkeypatch.chdir(tmp_path)
    assert (folder,) == planning.plan(Request(resume="one", **LOCAL)).payload.code_dirs


def test_extra_packages_are_got_before_anything_is_started(
    resolved, theirs, monkeypatch, tmp_path, docker, stopped_run
):
    requested = []

    def prepare(requirements: Path, python: str) -> Path:
        requested.append((requirements, python))
        (tmp_path / "kept").mkdir(exist_ok=True)
        (tmp_path / "kept" / "requirements.txt").write_text("resolved\n")
        return tmp_path / "kept"

    monkeypatch.setattr(planning.packages, "install_packages", prepare)
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
