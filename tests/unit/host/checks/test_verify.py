"""`invoke verify`: which trainings count as ok, what happens to the others, and the table that is written of them."""

import json
import math
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.checks import verify
from cluster.host.checks.verify import CASES, FAILED, OK, UNVERIFIED, CaseOutcome
from cluster.system import processes
from tests.support.command_line import exit_code

HANG = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000'], start_new_session=True); time.sleep(1000)"
NO_TPU = "--strategy tpu: this machine has no TPU; run this on a TPU VM"
ONE, MIRRORED, PS, TPU = CASES[0], CASES[2], CASES[8], CASES[10]
LOSSES = {step: 2.32 - 0.01 * step for step in range(1, 21)}


def reported(
    code: int = 0, losses: dict[int, float] | None = None, loss: float = 2.15, **summary: Any
) -> dict[str, Any]:
    """Return how an `up` ends: its exit code, its words, and the files of its run folder."""
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in (losses or LOSSES).items()]
    ended = {"state": "succeeded", "restarts": [], "metrics": {"eval_loss": loss, "eval_accuracy": 0.4}}
    files = {
        "summary.json": json.dumps(ended | summary),
        "control/result.json": json.dumps({"keras": "keras 3.15.1"}),
        "metrics/chief.jsonl": "\n".join([*rows, ""]),
    }
    return {"code": code, "says": "", "files": files}


def refused(code: int, says: str) -> dict[str, Any]:
    return {"code": code, "says": says, "files": {}}


def read(folder: Path, name: str, ended: dict[str, Any]) -> CaseOutcome:
    """Return the outcome of a case whose `up` ended so."""
    for path, text in ended["files"].items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return verify._read(RunFolder(folder / name), ended["code"], ended["says"].splitlines(), 1.0)


@pytest.fixture
def up(monkeypatch) -> dict[str, dict[str, Any]]:
    """How each case's `up` ends, by its name: all is well but for the TPU, unless a test changes it."""
    does = {case.name: refused(3, f"error: {NO_TPU}") if case.strategy == "tpu" else reported() for case in CASES}
    monkeypatch.setattr(verify, "train_case", lambda case, runs, limit_s: read(runs, case.name, does[case.name]))
    return does


def test_a_machine_without_a_tpu_verifies_the_rest_and_leaves_nothing(temporary_files, up):
    lines: list[str] = []
    rows = verify.verify_strategies(lines.append)
    assert [OK] * 10 + [UNVERIFIED] * 2 + [OK] == [row["status"] for row in rows]
    assert [0.0] * 8 + [None] * 4 + [0.0] == [row["parity"] for row in rows]
    found = [tuple(rows[at][key] for key in ("strategy", "loop", "keras")) for at in (4, 11)]
    assert [("CentralStorageStrategy", "custom", "keras 3.15.1"), ("TPUStrategy", "fit", None)] == found
    assert NO_TPU == rows[11]["detail"]
    assert len(CASES) == len(lines) == len(verify.table_lines(rows)) - 1
    assert [] == list(temporary_files.iterdir())


@pytest.mark.parametrize(
    ("case", "does", "status"),
    [
        (MIRRORED, reported(), OK),
        (MIRRORED, reported(losses=LOSSES | {10: LOSSES[10] * (1 + 5e-7), 11: 2.0}), OK),  # the 11th is not compared
        (MIRRORED, reported(losses=LOSSES | {10: LOSSES[10] * (1 + 2e-5)}), FAILED),
        (MIRRORED, reported(losses=LOSSES | {20: math.inf}), FAILED),
        (MIRRORED, reported(losses={step: LOSSES[step] for step in LOSSES if step != 3}), FAILED),
        (MIRRORED, reported(metrics={"eval_accuracy": 0.4019}), OK),
        (MIRRORED, reported(metrics={"eval_accuracy": 0.4021}), FAILED),
        (MIRRORED, reported(metrics={"eval_accuracy": math.nan}), FAILED),
        (MIRRORED, reported(metrics={}), FAILED),
        (MIRRORED, reported(restarts=[{"task": "chief", "cause": "exit code 70"}]), FAILED),
        (MIRRORED, reported(1, state="failed", cause={"error": "loss is nan at step 2"}), FAILED),
        (MIRRORED, refused(3, "error: 2 tasks need memory\nmake"), FAILED),
        (MIRRORED, refused(1, "Traceback"), FAILED),
        # Parameter servers need not give the same losses, but they must converge.
        (PS, reported(losses={step: 2.4 - 0.1 * ((step - 1) // 5) for step in LOSSES}, loss=2.15 * 1.049), OK),
        (PS, reported(losses=dict.fromkeys(LOSSES, 2.3)), FAILED),
        (PS, reported(losses=LOSSES | {20: math.nan}), FAILED),
        (PS, reported(loss=2.15 * 1.051), FAILED),
        (PS, reported(loss=math.nan), FAILED),
        (TPU, refused(3, f"error: {NO_TPU}"), UNVERIFIED),
        (TPU, reported(), OK),
        (TPU, refused(1, "error: it broke"), FAILED),
    ],
)
def test_which_trainings_count_as_ok(temporary_files, case, does, status):
    row = verify.judge_case(case, read(temporary_files, "it", does), read(temporary_files, "reference", reported()))
    assert status == row["status"]
    assert (status == OK and case != PS) <= (row["parity"] is not None)
    cause = json.loads(does["files"].get("summary.json", "{}")).get("cause", {"error": ""})["error"]
    said = does["says"].partition("error: ")[2].partition("\n")[0]
    assert row["detail"] and (cause or said) in row["detail"]  # it names the error of the run


def test_without_a_reference_nothing_is_ok_and_the_run_folders_are_kept(temporary_files, up):
    up[ONE.name] = reported(1, state="failed", cause={"error": "no space"}, losses={1: math.nan})
    lines: list[str] = []
    rows = verify.verify_strategies(lines.append)
    assert [FAILED] * 10 + [UNVERIFIED] * 2 + [FAILED] == [row["status"] for row in rows]
    assert "no space" == rows[0]["detail"]
    assert {"nothing to compare it with: one-custom failed"} == {row["detail"] for row in rows[1:10]}
    json.dumps(rows, allow_nan=False)
    (kept,) = temporary_files.iterdir()
    assert str(kept) in lines[-1]
    assert (kept / "one-custom" / "summary.json").exists()


def test_what_hangs_is_ended_with_everything_it_started(temporary_files, monkeypatch):
    monkeypatch.setattr(verify, "case_command", lambda case: [sys.executable, "-c", HANG])
    ended = verify.train_case(MIRRORED, temporary_files, 1)
    assert ended.code is None
    assert ended.problem
    assert [] == sorted(processes.ProcessTable().with_environment("RUNS_DIR", str(temporary_files)))


@pytest.mark.usefixtures("temporary_files")
def test_all_cases_together_have_a_limit(monkeypatch):
    monkeypatch.setattr(verify, "LIMIT_S", 0.0)
    assert len(CASES) == verify.count_failed(verify.verify_strategies(lambda line: None))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_what_it_started(temporary_files, monkeypatch, number):
    line = f"import os, signal; os.kill(os.getppid(), {int(number)}); {HANG}"
    monkeypatch.setattr(verify, "case_command", lambda case: [sys.executable, "-c", line])
    runs = temporary_files / "runs"
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: runs.mkdir() or str(runs))
    with pytest.raises(KeyboardInterrupt):
        verify.verify_strategies(lambda line: None)
    assert [] == sorted(processes.ProcessTable().with_environment("RUNS_DIR", str(runs)))
    assert [] == list(temporary_files.iterdir())
    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)


def test_json_is_all_that_stdout_gets_and_a_failed_row_is_exit_code_1(monkeypatch, capsys):
    reference = CaseOutcome(0, "", 1.0, "keras 3.15.1", LOSSES, {"eval_loss": 2.0, "eval_accuracy": 0.5})
    made = [verify.judge_case(case, reference, reference) for case in (ONE, MIRRORED)]
    monkeypatch.setattr(verify, "verify_strategies", lambda log: log("a case has ended") or made)
    assert 0 == exit_code("verify", json=True)
    printed = capsys.readouterr()
    assert {"rows": made} == json.loads(printed.out)
    assert "a case has ended" in printed.err
    made[1]["status"] = FAILED
    assert 1 == exit_code("verify")
