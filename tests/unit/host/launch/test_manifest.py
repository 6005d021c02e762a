"""What a run was made of: enough to make it again, and nothing private."""

import json
from pathlib import Path

from cluster.host.image import checkout
from cluster.host.launch import startup
from cluster.host.runtime.payload import Payload
from cluster.system.files import ROOT
from cluster.system.json_files import read_json


def test_a_manifest_says_what_ran_and_how(stopped_run):
    run = stopped_run(name="one", workers=1)
    found = run.load_manifest()
    assert ("one", "local", None) == (found["run"], found["runtime"], found["image"])
    assert checkout.commit() == (found["code"]["commit"] or "")
    assert found["config"] == read_json(run.config)
    assert found["cluster"] == read_json(run.cluster)
    assert {"type": "worker", "index": 0} == found["tf_config"]["worker-0"]["task"]
    assert "train-cpu.lock" in found["locks"]
    assert {64} == {len(digest) for digest in found["locks"].values()}


def test_a_manifest_holds_no_path_and_changed_code_is_reported(stopped_run, theirs, tmp_path, capsys):
    text = stopped_run(name="scripted", workers=0, script=str(theirs)).manifest.read_text()
    (tmp_path / "w.npz").touch()
    tuned = stopped_run(name="tuned", workers=0, init_from=str(tmp_path / "w.npz")).manifest.read_text()
    assert [] == [folder for folder in (str(tmp_path), str(Path.home()), str(ROOT)) if folder in text + tuned]
    config = json.loads(text)["config"]
    assert "fit.py" == config["script"]
    before = config["script_sha256"]
    theirs.write_text("print('goodbye')")
    for _ in range(2):
        changed = stopped_run(resume="scripted")
    assert before != changed.load_manifest()["config"]["script_sha256"]
    assert 1 == capsys.readouterr().out.count("code: ")


def test_outside_of_a_git_checkout_the_files_themselves_are_reported(tmp_path, monkeypatch):
    for module in (checkout, startup):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for part in ("train", "cluster"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "code.py").write_text("1")
    before = startup._code()
    assert before["commit"] is None
    (tmp_path / "train" / "code.py").write_text("2")
    after = startup._code()
    assert before["train_sha256"] != after["train_sha256"]
    assert before["cluster_sha256"] == after["cluster_sha256"]


def test_a_folder_of_the_user_s_is_identified_by_its_own_modules_alone(tmp_path):
    first, second = (tmp_path / name / "code" for name in ("one", "two"))
    for path in (first / "package" / "model.py", second / "model.py"):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    dirs = Payload(code_dirs=(first, second))
    before = startup._own_code(dirs)
    assert ["0/code", "1/code"] == list(before)
    for name in (".hidden", "environment/lib"):
        (first / name).mkdir(parents=True)
        (first / name / "other.py").write_text("2")
    (first / "environment" / "pyvenv.cfg").touch()
    (first / "package" / ".#model.py").symlink_to("user@host.1:2")  # an editor's lock
    (first / "package" / "notes.txt").write_text("2")
    assert before == startup._own_code(dirs)
    (first / "package" / "model.py").write_text("2")
    after = startup._own_code(dirs)
    assert (before["0/code"] != after["0/code"], before["1/code"]) == (True, after["1/code"])
