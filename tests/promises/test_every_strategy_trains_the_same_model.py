"""Every strategy that this machine can run trains, with both loops, to the results of the support table."""

import json
import time
from typing import Any

import pytest

from benchmarks import documents
from cluster.host.checks import verify
from cluster.host.checks.verify import Case
from cluster.system import processes
from tests.e2e.scenario import DATA
from tests.support.command_line import invoke
from tests.tools import strategies_page

REFERENCE = Case("one", "custom")


def check(rows: list[dict[str, Any]], cases: tuple[Case, ...]) -> None:
    """Check that the cases are ok on a CPU, agree up to rounding where they can, and are documented accordingly."""
    assert [(case.kind.class_name, case.loop) for case in cases] == [(row["strategy"], row["loop"]) for row in rows]
    for case, row in zip(cases, rows, strict=True):
        assert (verify.UNVERIFIED if case.kind.hardware else verify.OK) == row["status"], row
        if case.kind.synchronous and not case.kind.hardware:
            assert 0 <= row["parity"] <= verify.PARITY == 1e-6
        else:
            assert row["parity"] is None
    assert 0.0 == rows[0]["parity"]
    written = documents.written(strategies_page.PAGE, strategies_page.BEGIN)
    assert set(strategies_page.table(rows)) <= set(written), "renew it with python -m tests.tools.strategies_page"


@pytest.mark.parametrize(
    "others",
    [
        (Case("ps", "fit"),),
        # `tests/differential` and `test_tpu_shapes.py` always train with these in one process.
        pytest.param((Case("central", "custom"), Case("tpu", "custom")), marks=pytest.mark.extended),
    ],
)
def test_strategies_that_nothing_else_trains_with_must_be_ok_on_cpu(data, tmp_path, monkeypatch, others):
    cases = (REFERENCE, *others)
    monkeypatch.setenv("DATA_DIR", str(data))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(verify, "CASES", cases)
    for limit in ("CASE_LIMIT_S", "LIMIT_S"):
        monkeypatch.setattr(verify, limit, 1200.0)  # others use this machine, too
    check(verify.verify_strategies(print), cases)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.alone
def test_verify_must_do_so_with_both_loops_in_less_than_five_minutes_and_leave_nothing(data, tmp_path):
    began = time.monotonic()
    done = invoke("verify", "--json", DATA_DIR=str(DATA), RUNS_DIR=str(tmp_path / "runs"), TMPDIR=str(tmp_path))
    assert 0 == done.returncode, done.stderr
    assert time.monotonic() - began < 300
    check(json.loads(done.stdout)["rows"], verify.CASES)
    assert [] == list(tmp_path.iterdir())
    assert [] == sorted(processes.ProcessTable().with_environment("TMPDIR", str(tmp_path)))
