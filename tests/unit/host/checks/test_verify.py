"""`invoke verify`: which trainings count as ok, what happens to the others, and the table that is written of them."""

import json
import math
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from invoke import Exit, MockContext, Result

import tasks
from cluster.host.checks import documents as places
from cluster.host.checks import verify
from cluster.host.checks.verify import CASES, FAILED, OK, UNVERIFIED, Case, Ended
from cluster.system import processes
from cluster.system.errors import ClusterError

FAKE_UP = """
import json, os, pathlib, sys
name, reported = sys.argv[1], json.loads(sys.argv[2])
for path, text in reported["files"].items():
    file = pathlib.Path(os.environ["RUNS_DIR"], name, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
print(reported["says"])
sys.exit(reported["code"])
"""
HANG = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000'], start_new_session=True); time.sleep(1000)"
NO_TPU = "--strategy tpu: this machine has no TPU; run this on a TPU VM"
ONE, MIRRORED, PS, TPU = CASES[0], CASES[2], CASES[8], CASES[10]
LOSSES = {step: 2.32 - 0.01 * step for step in range(1, 21)}


def reported(
    code: int = 0,
    says: str = "",
    losses: dict[int, float] | None = None,
    accuracy: float = 0.4,
    loss: float = 2.15,
    **summary: Any,
) -> str:
    """Return the behaviour of the fake `up`: its exit code, its words, and the run folder that it leaves."""
    rows: list[dict[str, float]] = [{"step": step, "loss": loss} for step, loss in (losses or LOSSES).items()]
    rows.append({"step": 20, "eval_loss": loss, "eval_accuracy": accuracy})
    ended = {
        "state": "succeeded",
        "restarts": [],
        "metrics": {"eval_loss": loss, "eval_accuracy": accuracy},
        "weights_sha256": "a" * 64,
        **summary,
    }
    files = {
        "summary.json": json.dumps(ended),
        "control/result.json": json.dumps({"keras": "keras 3.15.1"}),
        "metrics/chief.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
    return json.dumps({"code": code, "says": says, "files": files})


def refused(code: int, says: str) -> str:
    return json.dumps({"code": code, "says": says, "files": {}})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where the folders of runs are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def up(monkeypatch) -> dict[str, str]:
    """What each case's `up` does, by its name: all is well but for the TPU, unless a test changes it."""
    does = {case.name: refused(3, f"error: {NO_TPU}") if case.strategy == "tpu" else reported() for case in CASES}

    def command(case: Case) -> list[str]:
        words = [FAKE_UP, case.name, does[case.name]] if does[case.name] else [HANG]
        return [sys.executable, "-c", *words]

    monkeypatch.setattr(verify, "command", command)
    return does


def judged(case: Case, folder: Path, up: dict[str, str], does: str) -> dict[str, Any]:
    """Return the row of a case that does this, compared with a good reference."""
    reference = verify.train(ONE, folder, 30)
    up[case.name] = does
    return verify.judge(case, verify.train(case, folder, 30), reference)


def quiet(line: str) -> None:
    """Take a line and forget it."""


# Rows


def test_the_cases_are_every_strategy_with_each_loop_that_it_has_and_ask_up_for_them():
    assert 13 == len(CASES) == len(set(CASES))
    assert {"custom", "fit"} == {case.loop for case in CASES}
    assert (
        f"{sys.executable} -m invoke up --name multiworker-fit --runtime local --tensorboard-port 0 "
        "--strategy multiworker --workers 1 --loop fit -- "
        "--max-steps 20 --log-every 1 --steps-per-loop 5 --evaluate-every 1000"
    ) == " ".join(verify.command(CASES[7]))


def test_a_machine_without_a_tpu_verifies_the_rest_and_leaves_nothing(folder, up):
    lines: list[str] = []
    rows = verify.examine(lines.append)
    assert [OK] * 10 + [UNVERIFIED] * 2 + [OK] == [row["status"] for row in rows]
    assert [0.0] * 8 + [None] * 4 + [0.0] == [row["parity"] for row in rows]
    assert {"strategy", "loop", "keras", "status", "parity", "detail"} == set(rows[0])
    assert ("TPUStrategy", "fit", None, NO_TPU) == tuple(
        rows[11][key] for key in ("strategy", "loop", "keras", "detail")
    )
    assert ("CentralStorageStrategy", "keras 3.15.1") == (rows[4]["strategy"], rows[4]["keras"])
    assert "loss 2.3100 to 2.1200, accuracy 0.4000, evaluation loss 2.1500" in rows[0]["detail"]
    assert "same weights" not in rows[0]["detail"]
    assert rows[1]["detail"].endswith("same weights as one-custom")
    assert "asynchronous" in rows[8]["detail"]
    assert len(CASES) == len(lines)  # as each case ended
    assert 1 + len(CASES) == len(verify.lines(rows))
    assert 0 == verify.failed(rows)
    assert [] == list(folder.iterdir())


def test_users_runs_are_left_alone(folder, up):
    verify.train(ONE, folder, 30)
    assert (folder / "one-custom" / "summary.json").exists()
    assert not Path(os.environ["RUNS_DIR"]).exists()


@pytest.mark.parametrize(
    ("does", "detail"),
    [
        (reported(losses=LOSSES | {7: math.nan}), "the loss of step 7 is missing or not finite"),
        (reported(losses=LOSSES | {20: math.inf}), "the loss of step 20 is missing or not finite"),
        (reported(losses={step: LOSSES[step] for step in LOSSES if step != 3}), "the loss of step 3 is missing"),
        (reported(losses=LOSSES | {10: LOSSES[10] * (1 + 2e-5)}), "losses up to 2.0e-05 from those of one-custom"),
        (reported(accuracy=0.4021), "accuracy 0.4021, 0.4000 in one-custom"),
        (reported(accuracy=math.nan), "accuracy nan"),
        (reported(metrics={}), "accuracy nan"),
        (reported(restarts=[{"task": "chief", "cause": "exit code 70"}]), "restarted: chief, exit code 70"),
        (reported(1, state="failed", cause={"error": "loss is nan at step 2"}), "loss is nan at step 2"),
        (reported(130, state="stopped"), "`up` ended with exit code 130, the run stopped"),
        (refused(3, "error: 2 tasks need memory\nmake"), "2 tasks need memory"),
        (refused(1, "Traceback"), "`up` ended with exit code 1, the run None"),
    ],
)
def test_what_trains_wrong_fails_and_says_why(folder, up, does, detail):
    row = judged(MIRRORED, folder, up, does)
    assert FAILED == row["status"]
    assert detail in row["detail"]


def test_a_small_difference_is_ok_and_reported(folder, up):
    losses = LOSSES | {10: LOSSES[10] * (1 + 5e-7), 11: 2.0}  # the eleventh step is not compared
    row = judged(MIRRORED, folder, up, reported(losses=losses, accuracy=0.4019))
    assert OK == row["status"]
    assert pytest.approx(5e-7) == row["parity"]


def test_parameter_servers_need_not_give_the_same_losses(folder, up):
    means = {step: 2.4 - 0.1 * ((step - 1) // 5) for step in LOSSES}
    row = judged(PS, folder, up, reported(losses=means, accuracy=0.3, loss=2.15 * 1.049))
    assert (OK, None) == (row["status"], row["parity"])


@pytest.mark.parametrize(
    ("does", "detail"),
    [
        (reported(losses=dict.fromkeys(LOSSES, 2.3)), "it does not learn: loss 2.3000 at step 1, 2.3000 at step 20"),
        (reported(losses=LOSSES | {20: math.nan}), "the loss of step 20 is missing or not finite"),
        (reported(loss=2.15 * 1.051), "expected within 5%"),
        (reported(loss=math.nan), "evaluation loss nan"),
    ],
)
def test_parameter_servers_must_converge(folder, up, does, detail):
    row = judged(PS, folder, up, does)
    assert (FAILED, None) == (row["status"], row["parity"])
    assert detail in row["detail"]


def test_where_a_tpu_answers_it_is_compared_like_the_others(folder, up):
    assert (OK, 0.0) == tuple(judged(TPU, folder, up, reported())[key] for key in ("status", "parity"))
    assert FAILED == judged(TPU, folder, up, refused(1, "error: it broke"))["status"]


def test_without_a_reference_nothing_is_ok_and_the_run_folders_are_kept(folder, up):
    up[ONE.name] = reported(1, state="failed", cause={"error": "no space"}, losses={1: math.nan})
    lines: list[str] = []
    rows = verify.examine(lines.append)
    assert [FAILED] * 10 + [UNVERIFIED] * 2 + [FAILED] == [row["status"] for row in rows]
    assert "no space" == rows[0]["detail"]
    assert {"nothing to compare it with: one-custom failed"} == {row["detail"] for row in rows[1:10]}
    json.dumps(rows, allow_nan=False)
    (kept,) = folder.iterdir()
    assert str(kept) in lines[-1]
    assert (kept / "one-custom" / "summary.json").exists()


# Ends


def test_what_hangs_is_ended_with_everything_it_started(folder, up):
    up[MIRRORED.name] = ""
    ended = verify.train(MIRRORED, folder, 1)
    assert ended.code is None
    assert re.fullmatch(r"ended after [1-9]\d* s because it was not done: no task started", ended.problem)
    assert [] == sorted(processes.ProcessTable().with_environment("RUNS_DIR", str(folder)))


def test_a_hang_says_what_every_task_was_doing(folder, monkeypatch, up):
    beat = {"task": "chief", "state": "compiling", "updated_at": 4e9}
    does = json.dumps({"code": 0, "says": "", "files": {"status/chief.json": json.dumps(beat)}})
    line = f"{FAKE_UP.replace('sys.exit', 'import time; time.sleep(1000) #')}"
    monkeypatch.setattr(verify, "command", lambda case: [sys.executable, "-c", line, case.name, does])
    assert verify.train(MIRRORED, folder, 1).problem.endswith("not done: chief compiling")


def test_all_cases_together_have_a_limit(monkeypatch, up):
    monkeypatch.setattr(verify, "LIMIT_S", 0.0)
    rows = verify.examine(quiet)
    assert {"not started: all cases have 0 s together, and these are over"} == {row["detail"] for row in rows}
    assert len(CASES) == verify.failed(rows)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_what_it_started(folder, monkeypatch, number):
    line = f"import os, signal; os.kill(os.getppid(), {int(number)}); {HANG}"
    monkeypatch.setattr(verify, "command", lambda case: [sys.executable, "-c", line])
    made: list[str] = []
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda prefix: made.append(str(folder / "runs")) or (folder / "runs").mkdir() or made[0]
    )
    with pytest.raises(KeyboardInterrupt):
        verify.examine(quiet)
    assert [] == sorted(processes.ProcessTable().with_environment("RUNS_DIR", made[0]))
    assert [] == list(folder.iterdir())
    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)


# The table


def rows(**changes: Any) -> list[dict[str, Any]]:
    reference = Ended(0, "", 1.0, "keras 3.15.1", LOSSES, {"eval_loss": 2.0, "eval_accuracy": 0.5}, "a")
    missing = Ended(3, NO_TPU)
    made = [verify.judge(case, missing if case.strategy == "tpu" else reference, reference) for case in CASES]
    made[3] |= changes
    return made


def test_the_table_has_no_number_that_differs_from_machine_to_machine():
    lines = verify.table(rows(parity=3.2e-7, detail="12 s"))
    assert [
        "| options of `up` | strategy | `--loop` | Keras | status | parity |",
        "|---|---|---|---|---|---|",
        "| `--strategy one` | OneDeviceStrategy | custom | keras 3.15.1 | ok | reference |",
        "| `--strategy one` | OneDeviceStrategy | fit | keras 3.15.1 | ok | within 1e-6 |",
        "| `--strategy mirrored --devices 2` | MirroredStrategy | custom | keras 3.15.1 | ok | within 1e-6 |",
        "| `--strategy mirrored --devices 2` | MirroredStrategy | fit | keras 3.15.1 | ok | within 1e-6 |",
    ] == lines[:6]
    assert (
        "| `--strategy ps --workers 2 --ps 1` | ParameterServerStrategy | fit | keras 3.15.1 | ok "
        "| asynchronous: within 5% |"
    ) == lines[11]
    assert "| `--strategy tpu` | TPUStrategy | fit | - | not verified on hardware | - |" == lines[13]
    assert 2 + len(CASES) == len(lines)
    assert lines == verify.table(rows(parity=1e-9, detail="40 s"))
    assert verify.table(rows(status=FAILED, parity=1.0))[5].endswith("| failed | - |")


@pytest.fixture
def documents(tmp_path, monkeypatch) -> list[Path]:
    """Two documents with a place for the table."""
    paths = [tmp_path / "one.md", tmp_path / "two.md"]
    for path in paths:
        path.write_text(f"before\n{verify.BEGIN}\nold\n{places.END}\nafter\n")
    monkeypatch.setattr(verify, "DOCUMENTS", paths)
    return paths


def test_only_the_table_of_a_document_is_renewed(documents, monkeypatch):
    for _ in range(2):
        assert 0 == invoked(monkeypatch, rows(), write=True)
        for path in documents:
            assert verify.table(rows()) == places.written(path, verify.BEGIN)
            assert path.read_text().startswith(f"before\n{verify.BEGIN}\n| options")
            assert path.read_text().endswith(f"|\n{places.END}\nafter\n")


def test_a_document_without_a_place_for_the_table_is_reported(documents):
    documents[1].write_text(f"{verify.BEGIN}\n")
    with pytest.raises(ClusterError, match=r"two\.md has no lines"):
        verify.write(rows())
    assert ["old"] == places.written(documents[0], verify.BEGIN)


# The task


def invoked(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]], **options: Any) -> int:
    """Run the task on rows made already; return its exit code."""
    monkeypatch.setattr(verify, "examine", lambda log: log("a case has ended") or made)
    with pytest.raises(Exit) as ended:
        tasks.ns["verify"](MockContext(run=Result(), repeat=True), **options)
    return ended.value.code


def test_json_is_all_that_stdout_gets(monkeypatch, capsys, documents):
    assert 0 == invoked(monkeypatch, rows(), json=True)
    printed = capsys.readouterr()
    assert {"rows": rows()} == json.loads(printed.out)
    assert "a case has ended" in printed.err
    assert ["old"] == places.written(documents[0], verify.BEGIN)


def test_a_failed_row_is_exit_code_1_and_writes_nothing(monkeypatch, documents):
    assert 1 == invoked(monkeypatch, rows(status=FAILED))
    assert 1 == invoked(monkeypatch, rows(status=FAILED), write=True)
    assert ["old"] == places.written(documents[0], verify.BEGIN)
