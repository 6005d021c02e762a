"""The first process of a pod: who lays out the run folder, who opens it again, and what the exit code says."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.agent.schedulers import lifecycle, pod
from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host import kubernetes
from cluster.system.errors import EXIT_PEER_LOST, EXIT_TIMEOUT, TimedOut


@pytest.fixture
def given(tmp_path) -> Path:
    return records_of(tmp_path / "given", workers=1)


def records_of(folder: Path, **topology: Any) -> Path:
    cluster = kubernetes.place_tasks("jobset", spec.build(**topology), "a-run")
    folder.mkdir()
    values = {"cluster": cluster.to_json(), "config": {"global_batch": 8}, "started": {"max_restarts": 1}}
    for name, value in values.items():
        (folder / f".{name}").write_text(json.dumps(value))
        (folder / f"{name}.json").symlink_to(folder / f".{name}")  # as a mounted ConfigMap has them
    return folder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run that nothing was laid out of."""
    return RunFolder(tmp_path / "runs" / "a-run")


def test_the_chief_lays_out_a_new_run(run, given):
    pod.prepare_folder(run, given)
    assert ["chief", "worker-0"] == [task.name for task in run.load_cluster().tasks]
    assert 8 == run.load_config()["global_batch"]
    assert run.started.time > 0
    assert 1 == len(run.generations())
    lifecycle.await_layout(run, 0)


@pytest.mark.parametrize("state", [None, "succeeded", "failed"])
def test_a_pod_that_comes_back_leaves_a_run_alone_that_has_not_stopped(run, given, state):
    pod.prepare_folder(run, given)
    run.begin_generation(1, resumed=True)
    if state:
        run.end(state, task="chief")
    pod.prepare_folder(run, given)
    assert (1, state) == (run.generation, run.outcome and run.outcome.state)


def test_a_run_that_stopped_continues_with_the_cluster_of_the_manifests(run, given, tmp_path):
    pod.prepare_folder(run, given)
    run.request_stop("chief")
    run.end("stopped", task="chief")
    with pytest.raises(TimedOut) as raised:
        lifecycle.await_layout(run, 0)
    assert EXIT_TIMEOUT == raised.value.exit_code
    pod.prepare_folder(run, records_of(tmp_path / "larger", workers=2))
    lifecycle.await_layout(run, 0)
    assert (None, False, 1) == (run.outcome, run.stop_requested, run.generation)
    assert 3 == len(run.load_cluster().tasks)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"state": "succeeded"}, 0),
        ({"state": "stopped"}, 130),
        ({"state": "failed"}, 1),
        ({"state": "failed", "exit_code": 2}, 2),
        ({"state": "failed", "exit_code": 137}, 1),
        (None, 130),
    ],
)
def test_the_exit_code_says_whether_to_start_again(run, given, outcome, code):
    pod.prepare_folder(run, given)
    if outcome:
        run.end(outcome.pop("state"), task="chief", **outcome)
    assert code == lifecycle.result_code(run)


@pytest.mark.parametrize(
    ("task", "name", "listed"),
    [
        ({"type": "chief", "index": 0}, "chief", True),
        ({"type": "worker", "index": 0}, "worker-0", True),
        ({"type": "evaluator", "index": 0}, "evaluator", True),
        (None, "chief", False),
    ],
)
def test_an_operator_says_by_tf_config_which_task_a_pod_is(task, name, listed, tmp_path, monkeypatch):
    """Kubeflow's lists the evaluator in the cluster, and sets none for a chief that is alone."""
    run = RunFolder(tmp_path / "runs" / "a-run")
    records = records_of(tmp_path / "given", workers=1 if listed else 0, evaluator=listed)
    pod.prepare_folder(run, records)
    theirs = {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}
    monkeypatch.setenv("RUN_DIR", str(run.path))
    monkeypatch.setenv("RECORDS_DIR", str(records))
    monkeypatch.delenv("TASK", raising=False)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": theirs, "task": task}) if task else "")
    seen: dict[str, str] = {}

    def agent(*_: object) -> int | None:
        seen.update({key: pod.os.environ.get(key, "") for key in ("TASK", "TF_CONFIG")})
        asked_to_end = 0 if name == "chief" else EXIT_PEER_LOST  # as the run continues without the others
        return asked_to_end if listed else None  # a newer copy of the task has begun

    monkeypatch.setattr(pod, "run_agent", agent)
    assert 130 == pod.main()
    assert [name] == [record.stem for record in (run.control / "copies").iterdir()]
    assert name == seen["TASK"]
    assert bool(seen["TF_CONFIG"]) == listed
    if listed:
        ours = json.loads(seen["TF_CONFIG"])
        assert {"chief", "worker"} == set(ours["cluster"])
        assert task == ours["task"]
