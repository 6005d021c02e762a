"""The support table is what real trainings give: every strategy that this machine can run, with both loops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.checks import documents, verify
from cluster.strategies import STRATEGIES
from cluster.system import process_table
from tests.e2e.scenario import DATA, ROOT


@dataclass
class Verified:
    """What `invoke verify --json` gave."""

    code: int
    rows: list[dict[str, Any]]
    seconds: float
    temporary: Path

    def of(self, *strategies: str) -> list[dict[str, Any]]:
        """Return the rows of some strategies."""
        return [row for row in self.rows if row["strategy"] in [STRATEGIES[name].class_name for name in strategies]]


@pytest.fixture(scope="module")
def verified(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verified]:
    """`invoke verify --json`, once for all tests."""
    temporary, began = tmp_path_factory.mktemp("verify"), time.monotonic()
    documents = [path.read_text() for path in verify.DOCUMENTS]
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "verify", "--json"],
        cwd=ROOT,
        env=os.environ | {"DATA_DIR": str(DATA), "RUNS_DIR": str(temporary / "runs"), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
    )
    assert documents == [path.read_text() for path in verify.DOCUMENTS]
    yield Verified(done.returncode, json.loads(done.stdout)["rows"], time.monotonic() - began, temporary)
    assert [] == sorted(process_table.ProcessTable().with_environment("TMPDIR", str(temporary)))


def test_every_strategy_with_both_loops_must_be_ok_on_cpu(verified: Verified) -> None:
    failed = [row for row in verified.rows if row["status"] == verify.FAILED]
    assert [] == failed
    assert 0 == verified.code
    assert [(case.kind.class_name, case.loop) for case in verify.CASES] == [
        (row["strategy"], row["loop"]) for row in verified.rows
    ]
    assert {"ok"} == {row["status"] for row in verified.of("one", "mirrored", "central", "multiworker", "ps")}


def test_synchronous_losses_must_agree_to_rounding(verified: Verified) -> None:
    parities = [row["parity"] for row in verified.of("one", "mirrored", "central", "multiworker")]
    assert 0.0 == parities[0]
    assert max(parities) <= verify.PARITY == 1e-5
    assert {None} == {row["parity"] for row in verified.of("ps")}


def test_the_tables_in_the_documents_must_be_what_verify_gives(verified: Verified) -> None:
    for path in verify.DOCUMENTS:
        assert verify.table(verified.rows) == documents.written(path, verify.BEGIN), (
            f"{path.name}: renew it with invoke verify --write"
        )


def test_it_must_take_less_than_five_minutes_and_leave_nothing(verified: Verified) -> None:
    assert verified.seconds < 300
    assert [] == list(verified.temporary.iterdir())
