"""How a run ended, and what its exit code is."""

import time

import pytest

from cluster.contract.results import summary
from cluster.contract.run.records import Summary
from cluster.host.control import watch
from cluster.host.runtime import tensorboard
from cluster.host.view.ended import ended_lines
from cluster.system.errors import TimedOut
from cluster.system.json_files import read_json, write_json
from tests.support.beats import beat
from tests.support.ending import end


def test_a_success_reports_accuracy_folder_tensorboard_and_what_is_next(run, monkeypatch):
    monkeypatch.setattr(tensorboard, "running", lambda runs_dir: 6006)
    write_json(run.control / "result.json", {"steps": 938, "metrics": {"eval_accuracy": 0.89123}})
    summary_line, *rest = (end(run, "succeeded"), ended_lines(run, "runs/demo"))[1]
    assert summary_line.startswith("succeeded: 938 steps in ")
    assert summary_line.endswith(", accuracy 0.8912 on the test set")
    assert [
        "run folder   runs/demo",
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
    rule, *inside, rule_too, folder, further, command = ended_lines(run, "runs/demo")
    at = time.strftime("%H:%M:%S", time.localtime(run.outcome.time))
    assert [
        "run demo failed after 7 steps",
        "chief: exit code 137 (SIGKILL: killed), ended because of the other",
        "restart 1: worker-0, exit code 139 (SIGSEGV: crashed in native code)",
        f"root cause: worker-0 at {at}, exit code 1: loss is nan at step 7",
        "its log: invoke logs worker-0",
    ] == inside
    assert {"-"} == set(rule) == set(rule_too)
    assert ("run folder   runs/demo", "next         fix the cause, then:") == (folder, further)
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
    with pytest.raises(TimedOut, match=r"run demo has not ended after 0.1 s; it goes on"):
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
    ] == ended_lines(run, "runs/demo")[1:3]


def test_a_run_that_claims_to_start_after_its_end_took_no_time(run):
    write_json(run.control / "started.json", read_json(run.control / "started.json") | {"time": time.time() + 60})
    run.end("succeeded")
    assert 0.0 == summary.write(run, settle_s=0).wall_s
