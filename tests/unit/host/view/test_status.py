"""The state of a run, how it ended, and its exit code."""

import re
import time

import pytest

from cluster.contract.results import summary
from cluster.contract.run.records import Summary
from cluster.host.control import watch
from cluster.host.runtime import tensorboard
from cluster.host.view.ended import ended_lines
from cluster.host.view.status import progress, read_status, status_table
from cluster.system.errors import TimedOut
from cluster.system.json_files import read_json, write_json
from tests.support.beats import LEDGER, beat, end, save

PACE = {"step_ms": {"mean": 90.0, "median": 88.2}, "busy_share": 0.75, "input_share": 0.016}


def test_a_run_that_has_not_begun_is_starting(run):
    value = read_status(run)
    assert ("demo", "starting", "MultiWorkerMirroredStrategy", 0, 0) == tuple(
        value[key] for key in ("run", "state", "strategy", "generation", "step")
    )
    assert [] == value["tasks"]
    assert {"stragglers": [], "starved": []} == value["pace"]
    assert {None} == {value[key] for key in ("steps_total", "eta_s", "examples_per_s", "checkpoint", "tensorboard")}


def test_status_holds_what_the_contract_lists(run, monkeypatch):
    monkeypatch.setattr(tensorboard, "running", lambda runs_dir: 6007)
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
        "pace": {"stragglers": [], "starved": []},
        "left_out": [],
        "last_event": None,
        "queued": "",
    } == value
    assert ["chief", "worker-0"] == [task["task"] for task in tasks]
    assert {"step": 10, "every_s": None} == {name: checkpoint[name] for name in ("step", "every_s")}
    assert 0 <= checkpoint["age_s"] < 60


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


def test_an_ended_run_has_its_summary_s_state_and_nothing_left_to_do(run):
    beat(run, "chief", "done", step=120, steps_total=120, examples_per_s=480.0)
    end(run, "succeeded")
    value = read_status(run)
    assert ("succeeded", None) == (value["state"], value["eta_s"])


def test_a_table_has_a_row_for_every_task(run):
    beat(run, "chief", "training", step=20, steps_total=120, examples_per_s=4801.4, loss=0.51234, restarts=1, **PACE)
    beat(run, "worker-0", "waiting", age_s=9)
    head, reached, names, chief, worker = status_table(read_status(run))
    assert "demo  training  MultiWorkerMirroredStrategy" == head
    assert "step 20/120" in reached
    columns = ["TASK", "STATE", "STEP", "EXAMPLES/S", "LOSS", "RESTARTS", "AGE", "MS/STEP", "BUSY", "INPUT"]
    assert columns == names.split()
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


def test_progress_says_what_is_known(run):
    beat(run, "chief", "training", step=20, steps_total=120, examples_per_s=480.0, loss=0.5)
    save(run, 10)
    expected = "step 20/120  loss 0.5000  480 examples/s  20 s left  checkpoint at 10"
    assert expected == progress(read_status(run))
    run.begin_generation(1)
    run.begin_generation(2)
    write_json(run.ledger(1), LEDGER | {"generation": 1, "saves": {"every_s": 12.34}})
    write_json(run.ledger(2), LEDGER | {"generation": 2, "saves": {}})  # it has not saved yet
    (saved,) = [line for line in status_table(read_status(run)) if line.startswith("saved")]
    assert re.fullmatch(r"saved  step 10, \d+ s ago, every 12\.3 s", saved)


def test_a_success_reports_accuracy_folder_tensorboard_and_what_is_next(run, monkeypatch):
    monkeypatch.setattr(tensorboard, "running", lambda runs_dir: 6006)
    write_json(run.control / "result.json", {"steps": 938, "metrics": {"eval_accuracy": 0.89123}})
    summary_line, *rest = (end(run, "succeeded"), ended_lines(run))[1]
    assert summary_line.startswith("succeeded: 938 steps in ")
    assert summary_line.endswith(", accuracy 0.8912 on the test set")
    assert [
        f"run folder   {run.path}",
        "TensorBoard  http://127.0.0.1:6006",
        "next         invoke down (ends TensorBoard), or train on:",
        "             invoke up --resume demo -- --epochs 6",
    ] == rest


def test_a_failure_reports_the_root_cause_last(run):
    beat(run, "chief", "stopped", step=5, exit_code=137)
    beat(run, "worker-0", "failed", step=7, exit_code=1)
    why = {"task": "worker-0", "cause": "exit code 139 (SIGSEGV: crashed in native code)", "step": 7}
    run.begin_generation(1, error="", failed_at=time.time(), **why)
    end(run, "failed", task="worker-0", exit_code=1, error="loss is nan at step 7")
    rule, *inside, rule_too, folder, further, command = ended_lines(run)
    at = time.strftime("%H:%M:%S", time.localtime(run.outcome.time))
    assert [
        "run demo failed after 7 steps",
        "chief: exit code 137 (SIGKILL: killed), ended because of the other",
        "restart 1: worker-0, exit code 139 (SIGSEGV: crashed in native code)",
        f"root cause: worker-0 at {at}, exit code 1: loss is nan at step 7",
        "its log: invoke logs worker-0",
    ] == inside
    assert {"-"} == set(rule) == set(rule_too)
    assert (f"run folder   {run.path}", "next         fix the cause, then:") == (folder, further)
    assert "invoke up --resume demo" == command.strip()


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ({"state": "succeeded"}, 0),
        ({"state": "stopped"}, 130),
        ({"state": "failed", "cause": {"exit_code": 1}}, 1),
        ({"state": "failed", "cause": {"exit_code": 2}}, 1),
        ({"state": "failed", "cause": {"exit_code": 3}}, 3),
        ({"state": "failed", "cause": {"exit_code": 4}}, 4),
        ({"state": "failed", "cause": {"exit_code": 137}}, 1),
        ({"state": "failed", "cause": {"exit_code": None}}, 1),
    ],
)
def test_the_exit_code_reports_how_the_run_ended(ended, code):
    assert code == watch.exit_code(Summary.from_json(ended))


def test_waiting_is_bounded(run):
    beat(run, "chief", "training")
    with pytest.raises(TimedOut, match=r"run demo has not ended after 0.1 s; it continues"):
        watch.follow(run, lambda value: None, timeout_s=0.1)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("worker", ["training", "done"])
def test_a_run_in_which_nothing_lives_has_failed(run, worker):
    beat(run, "chief", "training", step=5, age_s=60)
    beat(run, "worker-0", worker, step=5, age_s=60)
    ended = watch.follow(run, lambda value: None, timeout_s=5)
    assert ("failed", 5) == (ended.state, ended.steps)
    assert "no task writes heartbeats: the engine or the supervisor stopped" == ended.cause.error


def test_the_summary_reports_where_the_time_went_and_who_was_slow(run):
    started = read_json(run.control / "started.json")["time"]
    seconds = {"input": 1.0, "compute": 5.0, "save": 0.5, "evaluate": 0.25}
    ledger = {"generation": 0, "began": started + 2, "first_step_at": started + 4, "updated_at": started + 11}
    write_json(run.ledger(0), ledger | {"first": 0, "step": 9, "timed_steps": 8, "seconds": seconds})
    generation_record = {"steps": 20, "step_ms": {"mean": 100.0}, "busy_share": 0.5, "input_share": 0.01}
    beat(run, "chief", "done", pace=generation_record)
    beat(run, "worker-0", "done", pace=generation_record | {"busy_share": 0.75})
    write_json(run.control / "outcome.json", {"state": "succeeded", "time": started + 20})
    value = summary.write(run, settle_s=0).to_json()
    assert {
        "start": 2.0, "compile": 2.0, **seconds, "lost": 0.0, "restart": 0.0, "other": 9.25,
    } == value["goodput_split"]  # fmt: skip
    assert value["wall_s"] == pytest.approx(sum(value["goodput_split"].values()))
    assert [{"task": "worker-0", "slower": 1.5, "input_part": 0.0}] == value["pace"]["stragglers"]
    assert generation_record == value["pace"]["tasks"]["chief"]
    assert [
        "time         other 46 %, train 30 % (5 % input), start 10 %, compile 10 %, save 2 %, evaluate 1 %",
        "pace         worker-0 is 1.5x slower, 0 % of it in input",
    ] == ended_lines(run)[1:3]


def test_a_run_that_claims_to_start_after_its_end_took_no_time(run):
    write_json(run.control / "started.json", read_json(run.control / "started.json") | {"time": time.time() + 60})
    run.end("succeeded")
    assert 0.0 == summary.write(run, settle_s=0).wall_s
