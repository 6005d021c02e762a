"""What is shown of a run, and how its end is reported, always from what the tasks recorded."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.agent import health
from cluster.checks import rerun
from cluster.control import trace, watch
from cluster.errors import TimedOut
from cluster.results import summary
from cluster.run.folder import RunFolder
from cluster.runtime import tensorboard
from cluster.system.json_files import read_json, write_json
from cluster.view import logs
from cluster.view.ended import ended_lines
from cluster.view.findings import findings_lines
from cluster.view.live import Live
from cluster.view.logs import print_logs
from cluster.view.plan import plan_lines
from cluster.view.status import live_lines, progress, read_status, status_table
from tests.unit.ending import end
from tests.unit.lives import LIFE

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def run(make_run: MakeRun) -> RunFolder:
    return make_run("demo", workers=1)


PACE = {"step_ms": {"mean": 90.0, "median": 88.2}, "busy_share": 0.75, "input_share": 0.016}


def beat(run: RunFolder, task: str, state: str, **values: Any) -> None:
    """Leave a heartbeat."""
    known = {"task": task, "role": task.partition("-")[0], "state": state, "generation": 0, "step": 0}
    rest = {"examples_per_s": None, "loss": None, "restarts": 0, "updated_at": time.time()}
    write_json(run.status(task), known | rest | values)


def save(run: RunFolder, *steps: int) -> None:
    """Leave records of checkpoints."""
    for step in steps:
        write_json(run.checkpoints / f"ckpt-{step}.json", {"step": step, "files": {}})


# Status


def test_who_was_left_out_is_shown_and_is_lost_or_waits(run: RunFolder) -> None:
    beat(run, "chief", "training", generation=1, step=7)
    beat(run, "worker-0", "training", updated_at=time.time() - 1000)
    run.begin_generation(1, task="worker-0", left_out=["worker-0"])
    value = read_status(run)
    assert ["worker-0"] == value["left_out"]
    assert ["training", "lost"] == [each["state"] for each in value["tasks"]]
    assert "without worker-0" in progress(value)
    beat(run, "worker-0", "waiting", generation=1)
    assert ["training", "waiting"] == [each["state"] for each in read_status(run)["tasks"]]


def test_a_run_that_has_not_begun_is_starting(run: RunFolder) -> None:
    value = read_status(run)
    assert ("demo", "starting", "MultiWorkerMirroredStrategy", 0, 0) == tuple(
        value[key] for key in ("run", "state", "strategy", "generation", "step")
    )
    assert [] == value["tasks"]
    assert {"stragglers": [], "starved": []} == value["pace"]
    assert {None} == {value[key] for key in ("steps_total", "eta_s", "examples_per_s", "checkpoint", "tensorboard")}


def test_status_holds_what_the_contract_lists(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
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
    } == value
    assert ["chief", "worker-0"] == [task["task"] for task in tasks]
    assert {"step": 10, "every_s": None} == {name: checkpoint[name] for name in ("step", "every_s")}
    assert 0 <= checkpoint["age_s"] < 60


def test_a_run_that_ended_says_how_to_train_as_long_again(run: RunFolder) -> None:
    end(run, "succeeded")
    for config, option in (({}, "--epochs 6"), ({"epochs": 0.5}, "--epochs 1"), ({"max_steps": 60}, "--max-steps 120")):
        write_json(run.config, config)
        assert ended_lines(run, "runs/demo")[-1].endswith(f" -- {option}")


def test_an_ended_run_has_its_summary_s_state_and_nothing_left_to_do(run: RunFolder) -> None:
    beat(run, "chief", "done", step=120, steps_total=120, examples_per_s=480.0)
    end(run, "succeeded")
    value = read_status(run)
    assert ("succeeded", None) == (value["state"], value["eta_s"])


def test_a_table_has_a_row_for_every_task(run: RunFolder) -> None:
    beat(run, "chief", "training", step=20, steps_total=120, examples_per_s=4801.4, loss=0.51234, restarts=1, **PACE)
    beat(run, "worker-0", "waiting", updated_at=time.time() - 9)
    head, names, chief, worker = status_table(read_status(run))
    assert "demo  training  MultiWorkerMirroredStrategy  step 20/120" in head
    columns = ["TASK", "STATE", "STEP", "EXAMPLES/S", "LOSS", "RESTARTS", "AGE", "MS/STEP", "BUSY", "INPUT"]
    assert columns == names.split()
    assert ["chief", "training", "20", "4,801", "0.5123", "1", "0s", "88.2", "75", "%", "2", "%"] == chief.split()
    assert ["worker-0", "waiting", "0", "-", "-", "0", "9s", "-", "-", "-"] == worker.split()
    assert len(names) == len(chief) == len(worker) < 100


def test_who_slows_the_others_down_is_reported_below_the_table(run: RunFolder) -> None:
    """Only of tasks that train: what another's heartbeat still says was before."""
    slow = {"step_ms": {"mean": 100.0, "median": 99.0}, "busy_share": 0.9, "input_share": 0.5}
    beat(run, "chief", "training", **slow | {"busy_share": 0.5, "input_share": 0.05})
    beat(run, "worker-0", "training", **slow)
    assert "worker-0 is 1.8x slower, 100 % of it in input" == status_table(read_status(run))[-1]
    beat(run, "worker-0", "waiting", **slow)
    assert 4 == len(status_table(read_status(run)))


def test_progress_says_what_is_known(run: RunFolder) -> None:
    beat(run, "chief", "training", step=20, steps_total=120, examples_per_s=480.0, loss=0.5)
    save(run, 10)
    told = "step 20/120  loss 0.5000  480 examples/s  20 s left  checkpoint at 10"
    assert told == progress(read_status(run))
    run.begin_generation(1)
    run.begin_generation(2)
    write_json(run.ledger(1), LIFE | {"generation": 1, "saves": {"every_s": 12.34}})
    write_json(run.ledger(2), LIFE | {"generation": 2, "saves": {}})  # it has not saved yet
    assert f"{told}, every 12.3 s" == progress(read_status(run))


# The live view

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def test_without_a_terminal_only_news_are_printed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    live = Live()
    for state, step in [("waiting", 0), ("waiting", 0), ("training", 5), ("saving", 6), ("training", 7), ("done", 8)]:
        beat(run, "chief", state, step=step)
        live.show(read_status(run))
    assert ["chief waiting", "chief training", "step 5", "chief done"] == capsys.readouterr().out.splitlines()


def test_a_step_that_takes_long_is_reported_once(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Live, "LINE_EVERY_S", 0.0)
    live = Live()
    for step in (5, 5, 5, 6):
        beat(run, "chief", "training", step=step)
        live.show(read_status(run))
    assert ["chief training", "step 5", "step 6"] == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("no_colour", [False, True])
def test_in_a_terminal_the_table_redraws_itself(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_colour: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    beat(run, "chief", "training", step=1)
    with Live() as live:
        live.show(read_status(run))
        first = capsys.readouterr().out.removeprefix(HIDE_CURSOR)
        assert 5 == len(first.splitlines())
        assert max(map(len, first.splitlines())) <= 40  # a wrapped line could not be taken back
        beat(run, "chief", "training", step=2)
        live.show(read_status(run))
        assert capsys.readouterr().out.startswith("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K")
    assert SHOW_CURSOR in capsys.readouterr().out
    live.clear()
    assert "" == capsys.readouterr().out


def test_the_screen_shows_how_far_a_run_is(run: RunFolder) -> None:
    beat(run, "chief", "training", step=30, steps_total=120, examples_per_s=480.0, loss=0.5)
    beat(run, "worker-0", "training", step=30)
    run.event("worker-0", "restarted", cause="killed", step=20)
    save(run, 10)
    shown = live_lines(read_status(run), [3.0, 2.0, 1.0], 80)
    assert max(map(len, shown[:-3])) <= 80
    text = "\n".join(shown)
    for part in (
        " 25%",
        "step 30/120",
        "18 s left",
        "loss   █▅▁ 0.5000",
        "saved  step 10, ",
        "worker-0: restarted (killed) at step 20",
    ):
        assert part in text, part
    assert ["TASK", "chief", "worker-0"] == [line.split()[0] for line in shown[-3:]]


def test_the_screen_of_a_run_that_has_just_begun_is_short(run: RunFolder) -> None:
    assert "step 0" in "\n".join(live_lines(read_status(run), [], 40))


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    beat(run, "chief", "training", step=1)
    with Live() as live:
        live.show(read_status(run))
    assert ["chief training", "step 1"] == capsys.readouterr().out.splitlines()


# The end


def test_a_success_reports_accuracy_folder_tensorboard_and_what_is_next(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "running", lambda runs_dir: 6006)
    write_json(run.control / "result.json", {"steps": 938, "metrics": {"eval_accuracy": 0.89123}})
    summary_line, *rest = (end(run, "succeeded"), ended_lines(run, "runs/demo"))[1]
    assert summary_line.startswith("succeeded: 938 steps in ")
    assert summary_line.endswith(", accuracy 0.8912 on the test set")
    assert [
        "run folder   runs/demo",
        "TensorBoard  http://127.0.0.1:6006",
        "next         invoke down (ends TensorBoard), or train on: invoke up --resume demo -- --epochs 6",
    ] == rest


@pytest.mark.parametrize(("restarts", "told"), [(0, ""), (1, ", 1 restart"), (2, ", 2 restarts")])
def test_restarts_are_counted(run: RunFolder, restarts: int, told: str) -> None:
    end(run, "succeeded")
    value = read_json(run.summary) | {"restarts": [{}] * restarts, "steps": 1, "wall_s": 1.0}
    write_json(run.summary, value)
    assert f"succeeded: 1 step in 1.0 s{told}" == ended_lines(run, "runs/demo")[0]


def test_a_stop_reports_how_to_go_on(run: RunFolder) -> None:
    end(run, "stopped")
    assert "next         invoke up --resume demo" == ended_lines(run, "runs/demo")[-1]


def test_a_failure_reports_the_root_cause_last(run: RunFolder) -> None:
    beat(run, "chief", "stopped", step=5, exit_code=137)
    beat(run, "worker-0", "failed", step=7, exit_code=1)
    why = {"task": "worker-0", "cause": "exit code 139 (SIGSEGV: crashed in native code)", "step": 7}
    run.begin_generation(1, error="", failed_at=time.time(), **why)
    end(run, "failed", task="worker-0", exit_code=1, error="loss is nan at step 7")
    rule, *inside, rule_too, folder, further = ended_lines(run, "runs/demo")
    at = time.strftime("%H:%M:%S", time.localtime(run.outcome["time"]))
    assert [
        "run demo failed after 7 steps",
        "chief: exit code 137 (SIGKILL: killed), ended because of the other",
        "restart 1: worker-0, exit code 139 (SIGSEGV: crashed in native code)",
        f"root cause: worker-0 at {at}, exit code 1: loss is nan at step 7",
        "its log: invoke logs worker-0",
    ] == inside
    assert {"-"} == set(rule) == set(rule_too)
    assert ("run folder   runs/demo", "next         mend the cause, then invoke up --resume demo") == (folder, further)


def test_an_exit_code_that_the_error_begins_with_is_shown_once(run: RunFolder) -> None:
    end(run, "failed", task="chief", exit_code=1, error="exit code 1, last line: nan")
    (told,) = [line for line in ended_lines(run, "runs/demo") if line.startswith("root cause: ")]
    assert re.fullmatch(r"root cause: chief at \d\d:\d\d:\d\d: exit code 1, last line: nan", told)


def test_a_failure_that_is_no_task_s_is_reported_too(run: RunFolder) -> None:
    end(run, "failed", error="no task writes heartbeats")
    (told,) = [line for line in ended_lines(run, "runs/demo") if line.startswith("root cause: ")]
    assert re.fullmatch(r"root cause: the run at \d\d:\d\d:\d\d: no task writes heartbeats", told)


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
def test_the_exit_code_reports_how_the_run_ended(ended: dict[str, Any], code: int) -> None:
    assert code == watch.exit_code(ended)


def test_waiting_is_bounded(run: RunFolder) -> None:
    beat(run, "chief", "training")
    with pytest.raises(TimedOut, match=r"run demo has not ended after 0.1 s; it goes on"):
        watch.follow(run, lambda value: None, timeout_s=0.1)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("worker", ["training", "done"])
def test_a_run_in_which_nothing_lives_has_failed(run: RunFolder, worker: str) -> None:
    beat(run, "chief", "training", step=5, updated_at=time.time() - 60)
    beat(run, "worker-0", worker, step=5, updated_at=time.time() - 60)
    ended = watch.follow(run, lambda value: None, timeout_s=5)
    assert ("failed", 5) == (ended["state"], ended["steps"])
    assert "no task writes heartbeats: the engine or the supervisor stopped" == ended["cause"]["error"]


def test_the_summary_reports_where_the_time_went_and_who_was_slow(run: RunFolder) -> None:
    started = read_json(run.control / "started.json")["time"]
    seconds = {"input": 1.0, "compute": 5.0, "save": 0.5, "evaluate": 0.25}
    told = {"generation": 0, "began": started + 2, "first_step_at": started + 4, "updated_at": started + 11}
    write_json(run.ledger(0), told | {"first": 0, "step": 9, "timed_steps": 8, "seconds": seconds})
    life = {"steps": 8, "step_ms": {"mean": 100.0}, "busy_share": 0.5, "input_share": 0.01}
    beat(run, "chief", "done", pace=life)
    beat(run, "worker-0", "done", pace=life | {"busy_share": 0.75})
    write_json(run.control / "outcome.json", {"state": "succeeded", "time": started + 20})
    value = summary.write(run, settle_s=0)
    assert {
        "start": 2.0, "compile": 2.0, **seconds, "lost": 0.0, "restart": 0.0, "other": 9.25,
    } == value["goodput_split"]  # fmt: skip
    assert value["wall_s"] == pytest.approx(sum(value["goodput_split"].values()))
    assert [{"task": "worker-0", "slower": 1.5, "input_part": 0.0}] == value["pace"]["stragglers"]
    assert life == value["pace"]["tasks"]["chief"]
    assert [
        "time         other 46 %, train 30 % (5 % input), start 10 %, compile 10 %, save 2 %, evaluate 1 %",
        "pace         worker-0 is 1.5x slower, 0 % of it in input",
    ] == ended_lines(run, "runs/demo")[1:3]


# Logs and health


def test_logs_of_several_tasks_carry_their_names(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.log("chief").write_text("one\ntwo\nhalf a li")
    run.log("worker-0").write_bytes(b"three \xff\n")
    print_logs(run, ["chief", "worker-0", "ps-0"], follow=False)
    shown = capsys.readouterr().out.splitlines()
    assert ["chief    | one", "chief    | two", "chief    | half a li", "worker-0 | three \ufffd"] == shown


START_UP = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795354087.737231   15772 port.cc:153] oneDNN custom operations are on.",
    "2026-11-22 13:00:00.1: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized",
    "E0000 00:00:1.2 3 cuda_fft.cc:467] Unable to register cuFFT factory: it was registered already",
)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_in_a_terminal_each_task_has_a_colour_and_start_up_messages_are_left_out(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("chief", "worker-0"):
        run.log(name).write_text("\n".join([*START_UP, "E0000 00:00:1.2 3 mine.cc:1] It broke", "port.cc"]) + "\n")
    print_logs(run, ["chief", "worker-0"], follow=False)
    assert 12 == len(capsys.readouterr().out.splitlines())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_logs(run, ["chief", "worker-0"], follow=False)
    shown = capsys.readouterr().out.splitlines()
    assert ["It broke", "port.cc", "It broke", "port.cc"] == [re.split(r"[|\]] |m ", line)[-1] for line in shown]
    assert bool(no_color) is ("\x1b" not in "".join(shown))


def test_the_log_of_one_task_is_shown_as_it_is(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    run.log("chief").write_text("one\ntwo\n")
    print_logs(run, ["chief"], follow=False)
    assert "one\ntwo\n" == capsys.readouterr().out


def test_followed_logs_go_on_until_the_run_ends(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.log("chief").write_text("one\nt")
    more = iter(["wo\nthree\n", "four\n"])

    def meanwhile(_: float) -> None:
        if (text := next(more, None)) is None:
            end(run, "succeeded")
            text = "five\nsix"
        with run.log("chief").open("a") as log:
            log.write(text)

    monkeypatch.setattr(logs.time, "sleep", meanwhile)
    print_logs(run, ["chief"], follow=True)
    assert ["one", "two", "three", "four", "five", "six"] == capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("state", "age_s", "healthy"),
    [("training", 0, True), ("done", 60, True), ("training", 60, False), ("failed", 0, False)],
)
def test_a_task_is_healthy_while_its_heartbeat_is_fresh(
    run: RunFolder, state: str, age_s: float, healthy: bool
) -> None:
    beat(run, "chief", state, step=3, updated_at=time.time() - age_s)
    shown = "lost" if age_s and state == "training" else state
    assert (healthy, f"chief is {shown} at step 3") == health.check(run, "chief")


def test_a_task_without_a_heartbeat_is_not_healthy(run: RunFolder) -> None:
    assert (False, "chief has no heartbeat yet") == health.check(run, "chief")


BATCH = {"global_batch": 192, "replica_batch": 192, "micro_batches": 1, "micro_batch": 192}


def test_a_plan_says_what_each_task_gets(run: RunFolder) -> None:
    task = {"task": "chief", "address": "chief:2222", "tf_config": None}
    value = {"run": "demo", "strategy": "OneDeviceStrategy", "replicas": 1, "runtime": "local", "tasks": [task]}
    assert [
        "run demo: OneDeviceStrategy, 1 replica, runtime local",
        "global batch 192: 192 a replica and step",
        "chief  chief:2222  no TF_CONFIG: it trains alone",
    ] == plan_lines(value | BATCH)
    in_parts = plan_lines(value | BATCH | {"micro_batches": 4, "micro_batch": 48})
    assert "global batch 192: 192 a replica and step, in micro-batches of 48" == in_parts[1]


TRAINING = {"precision": "fp32", "optimizer": "adam", "learning_rate": 0.002, "scaling": "none", "warmup_steps": 100}
SCALED = {"precision": "bf16", "optimizer": "sgd", "base_learning_rate": 0.1, "base_batch": 48, "warmup_steps": 0}


@pytest.mark.parametrize(
    ("training", "told"),
    [
        (
            TRAINING | {"clip_norm": 0.0},
            "precision fp32, adam, learning rate 0.002 after 100 steps of warm-up, gradients not clipped",
        ),
        (
            SCALED | {"learning_rate": 0.4, "scaling": "linear", "clip_norm": 1.5},
            "precision bf16, sgd, learning rate 0.4 (linear: 0.1 x 192/48) at once, gradients clipped to norm 1.5",
        ),
        (
            SCALED | {"learning_rate": 0.2, "scaling": "sqrt", "clip_norm": 0.0},
            "precision bf16, sgd, learning rate 0.2 (sqrt: 0.1 x sqrt(192/48)) at once, gradients not clipped",
        ),
    ],
)
def test_a_plan_says_in_one_line_how_gradients_become_updates(training: dict[str, Any], told: str) -> None:
    value = {"run": "demo", "strategy": "OneDeviceStrategy", "replicas": 1, "runtime": "local", "tasks": []}
    with_task = value | {"tasks": [{"task": "chief", "address": "chief:2222", "tf_config": None}]}
    assert told == plan_lines(with_task | BATCH | {"training": training})[2]


def test_findings_end_with_their_fix(tmp_path: Path) -> None:
    found = [
        {"check": "python", "state": "ok", "detail": "3.11.2", "fix": ""},
        {"check": "data", "state": "warning", "detail": "none", "fix": "invoke data.prepare"},
    ]
    assert [
        "ok       python  3.11.2",
        "warning  data    none; invoke data.prepare",
    ] == findings_lines({"ok": True, "findings": found})


# What a terminal obeys


HOSTILE = "\x1b]0;title\x07\x1b[2J\nroot cause: none \u202e\x9b2J"


def lines_of(run: RunFolder) -> list[str]:
    """Return everything that is shown of a run that failed."""
    value = read_status(run)
    return [*status_table(value), *ended_lines(run, "runs/demo"), *status_table(value | {"script": HOSTILE})]


def test_nothing_that_a_task_reports_steers_the_terminal(run: RunFolder) -> None:
    beat(run, "chief", "training", role=HOSTILE)
    beat(run, "worker-0", HOSTILE)
    save(run, 1)
    end(run, "failed", task="chief", exit_code=1, error=f"loss {HOSTILE}")
    told = lines_of(run)
    assert all(line.isprintable() for line in told)
    assert r"\x1b]0;title\x07\x1b[2J\nroot cause: none \u202e\x9b2J" in "\n".join(told)  # and it can still be read
    assert not [line for line in told if line.startswith("root cause: none")]
    assert HOSTILE in read_json(run.summary)["cause"]["error"]  # what is kept stays as it was


def test_neither_does_a_run_that_is_watched(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    beat(run, "chief", HOSTILE, step=1)
    Live().show(read_status(run))
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_neither_do_a_comparison_and_a_trace(run: RunFolder) -> None:
    verdict = rerun.Verdict("different", 1, 0.5, 1, same_weights=False, differences=[f"code.commit: {HOSTILE} there"])
    answer = {"task": HOSTILE, "first": 1, "last": 2}
    assert all(line.isprintable() for line in [*rerun.lines(run, verdict), *trace.lines(run, answer, 2)])


def test_logs_keep_colours_in_a_terminal_and_everything_elsewhere(
    run: RunFolder, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    end(run, "succeeded")
    run.log("chief").write_bytes(b"\x1b[31mred\x1b[m\tand \x1b[2J\x1b]52;c;aWQ=\x07 gone\n")
    print_logs(run, ["chief"], follow=False)
    assert b"\x1b[31mred\x1b[m\tand \x1b[2J\x1b]52;c;aWQ=\x07 gone\n" == capsysbinary.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_logs(run, ["chief"], follow=False)
    assert b"\x1b[31mred\x1b[m\tand \\x1b[2J\\x1b]52;c;aWQ=\\x07 gone\x1b[m\n" == capsysbinary.readouterr().out
