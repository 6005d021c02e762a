"""The state of a run, how it ended, and its exit code."""

import time

import pytest

from cluster.contract.results import summary
from cluster.contract.run.records import Summary
from cluster.host.control import foreground
from cluster.host.runtime import tensorboard
from cluster.host.view import status
from cluster.host.view.status import ended_lines, progress, read_status, status_table
from cluster.system.json_files import read_json, write_json
from tests.support.beats import LEDGER, beat, end, save

PACE = {"step_ms": {"mean": 90.0, "median": 88.2}, "busy_share": 0.75, "input_share": 0.016}


def test_status_holds_what_the_contract_lists(run, monkeypatch):
    value = read_status(run)  # it has not begun
    assert ("starting", 0, []) == (value["state"], value["step"], value["tasks"])
    assert {None} == {value[key] for key in ("steps_total", "eta_s", "examples_per_s", "checkpoint", "tensorboard")}
    monkeypatch.setattr(tensorboard, "running_port", lambda runs_dir: 6007)
    beat(run, "worker-0", "training", step=20)
    beat(run, "chief", "training", step=20, steps_total=120, examples_per_s=480.0, loss=0.5)
    run.begin_generation(1)
    save(run, 10, 9)
    value = read_status(run)
    tasks, checkpoint = value.pop("tasks"), value.pop("checkpoint")
    assert {
        "run": "demo",
        "state": "training",
        "strategy": "MultiWorkerMirroredStrategy",
        "script": None,
        "generation": 1,
        "step": 20,
        "steps_total": 120,
        "eta_s": 20.0,  # 100 steps of 96 examples at 480 examples/s
        "examples_per_s": 480.0,
        "tensorboard": "http://127.0.0.1:6007",
        "mirror": None,
        "pace": {"stragglers": [], "starved": []},
        "late": None,
        "left_out": [],
        "last_event": None,
        "queued": "",
    } == value
    assert ["chief", "worker-0"] == [task["task"] for task in tasks]
    assert {"step": 10, "every_s": None} == {name: checkpoint[name] for name in ("step", "every_s")}
    assert 0 <= checkpoint["age_s"] < 60
    end(run, "succeeded")
    value = read_status(run)
    assert ("succeeded", None) == (value["state"], value["eta_s"])


@pytest.mark.usefixtures("hurried")
def test_who_was_left_out_is_shown_and_is_lost_or_waits(run):
    beat(run, "chief", "training", generation=1, step=7)
    beat(run, "worker-0", "training", updated_at=time.time() - 1000)
    run.begin_generation(1, task="worker-0", left_out=["worker-0"])
    value = read_status(run)
    assert ["worker-0"] == value["left_out"]
    assert ["training", "lost"] == [each["state"] for each in value["tasks"]]
    assert "without worker-0" in progress(value)
    beat(run, "worker-0", "waiting", generation=1)
    assert ["training", "waiting"] == [each["state"] for each in read_status(run)["tasks"]]


def test_a_run_that_ended_says_how_to_train_as_long_again(run):
    end(run, "succeeded")
    for config, option in (({}, "--epochs 6"), ({"epochs": 0.5}, "--epochs 1"), ({"max_steps": 60}, "--max-steps 120")):
        write_json(run.config, config)
        assert ended_lines(run)[-1].endswith(f" -- {option}")
    write_json(run.control / "result.json", {"epochs": 2.0})
    end(run, "succeeded")
    assert ended_lines(run)[-1].endswith(" -- --epochs 6 --max-steps 120")  # 60 more steps are 4 epochs


def test_a_table_has_a_row_for_every_task(run):
    beat(run, "chief", "training", step=20, steps_total=120, examples_per_s=4801.4, loss=0.51234, restarts=1, **PACE)
    beat(run, "worker-0", "waiting", age_s=9)
    _, reached, names, chief, worker = status_table(read_status(run))
    assert "step 20/120" in reached
    assert ["chief", "training", "20", "4,801", "0.5123", "1", "0s", "88.2", "75", "%", "2", "%"] == chief.split()
    assert ["worker-0", "waiting", "0", "-", "-", "0", "9s", "-", "-", "-"] == worker.split()
    assert len(names) == len(chief) == len(worker) < 100


def test_who_slows_the_others_down_is_reported_below_the_table(run):
    """Only of tasks that train: what another's heartbeat still says was before."""
    slow = {"step_ms": {"mean": 100.0, "median": 99.0}, "busy_share": 0.9, "input_share": 0.5, "pace": {"steps": 50}}
    beat(run, "chief", "training", **slow | {"busy_share": 0.5, "input_share": 0.05})
    beat(run, "worker-0", "training", **slow)
    assert "worker-0 is 1.8x slower, 100 % of it in input" == status_table(read_status(run))[-1]
    beat(run, "worker-0", "waiting", **slow)
    assert 5 == len(status_table(read_status(run)))


def test_the_interval_of_checkpoints_is_that_of_the_newest_generation_that_saved(run):
    beat(run, "chief", "training", step=20, steps_total=120)
    save(run, 10)
    run.begin_generation(1)
    run.begin_generation(2)
    write_json(run.ledger(1), LEDGER | {"generation": 1, "saves": {"every_s": 12.34}})
    write_json(run.ledger(2), LEDGER | {"generation": 2, "saves": {}})  # it has not saved yet
    assert 12.34 == read_status(run)["checkpoint"]["every_s"]


def test_a_success_reports_accuracy_folder_tensorboard_and_what_is_next(run, monkeypatch):
    monkeypatch.setattr(tensorboard, "running_port", lambda runs_dir: 6006)
    write_json(run.control / "result.json", {"steps": 938, "metrics": {"eval_accuracy": 0.89123}})
    end(run, "succeeded")
    text = "\n".join(ended_lines(run))
    for part in ("938 steps", "accuracy 0.8912", str(run.path), "http://127.0.0.1:6006", "invoke up --resume demo -- "):
        assert part in text


def test_a_failure_reports_the_root_cause_last(run):
    beat(run, "chief", "stopped", step=5, exit_code=137)
    beat(run, "worker-0", "failed", step=7, exit_code=1)
    why = {"task": "worker-0", "cause": "exit code 139 (SIGSEGV: crashed in native code)", "step": 7}
    run.begin_generation(1, error="", failed_at=time.time(), **why)
    end(run, "failed", task="worker-0", exit_code=1, error="loss is nan at step 7")
    _, _, chief, restart, cause, log, *rest = ended_lines(run)
    assert "exit code 137" in chief
    assert "exit code 139" in restart
    assert cause.startswith("root cause: worker-0 at ")
    assert cause.endswith("exit code 1: loss is nan at step 7")
    assert "invoke logs worker-0" in log
    assert "invoke up --resume demo" == rest[-1].strip()


@pytest.mark.parametrize(("exit_code", "code"), [(1, 1), (2, 1), (3, 3), (4, 4), (137, 1), (None, 1)])
def test_the_exit_code_reports_how_the_run_ended(exit_code, code):
    failed = Summary.from_json({"state": "failed", "cause": {"exit_code": exit_code}})
    assert code == foreground.exit_code(failed)
    for state, expected in (("succeeded", 0), ("stopped", 130)):
        assert expected == foreground.exit_code(Summary.from_json({"state": state}))


def test_a_run_that_claims_to_start_after_its_end_took_no_time(run):
    write_json(run.control / "started.json", read_json(run.control / "started.json") | {"time": time.time() + 60})
    run.end("succeeded")
    assert 0.0 == summary.write_summary(run, settle_s=0).wall_s


@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("1875/1875 - 3s - 2ms/step - accuracy: 0.91 - loss: 3.2e-01", {"accuracy": 0.91, "loss": 0.32}),
        ("12/60 [==>...] - ETA: 2s - loss: 2.3026 - val_loss: -1", {"loss": 2.3026, "val_loss": -1.0}),
        ("epoch: 3", {}),
        ("", {}),
    ],
)
def test_the_metrics_of_a_script_are_those_that_keras_prints(line, metrics):
    assert metrics == status._logged_metrics(line)
