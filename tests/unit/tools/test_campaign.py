"""A campaign: which runs it makes, when it is over, and how it counts them."""

from pathlib import Path
from typing import Any

import pytest

from cluster.host.checks import documents
from cluster.host.image import checkout
from cluster.system.errors import UsageError
from tests.tools.campaign import campaign, record
from tests.tools.campaign.cases import CASES

FAULT = {"kind": "kill", "task": "chief", "phase": "step", "step": 3}


def row(case: str, count: int = 4, **values: Any) -> record.Row:
    given = {"lost": "", "bits": record.SAME, "seconds": 1.0} | values
    return record.row(case, "0-0", "abc", [FAULT] * count, **given)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The cases of which runs are made, in their order."""
    cases: list[str] = []

    def run(self: object, case: Any, seed: str) -> record.Row:
        cases.append(case.name)
        return row(case.name)

    monkeypatch.setattr(campaign._Campaign, "run", run)
    return cases


def test_cases_take_turns_until_there_were_enough_faults(made):
    rows = campaign.main(campaign.chosen("fit,one"), 10, 0, 60.0, lambda line: None)
    assert ["fit", "one", "fit"] == made
    assert 12 == sum(sum(row["kinds"].values()) for row in rows)


def test_a_campaign_is_bounded_in_time(made):
    campaign.main(campaign.chosen(""), 10**6, 0, -1.0, lambda line: None)
    assert [] == made


def test_an_interrupted_campaign_ends_the_run_in_progress_before_its_folder_goes(monkeypatch):
    ended: list[tuple[str, bool]] = []

    def start(words: object, *, env: dict[str, str], **others: object) -> None:
        (Path(env["RUNS_DIR"]) / "calm-containers").mkdir()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkout, "commit", lambda: "abc")
    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr(campaign, "wait_until", interrupt)
    monkeypatch.setattr(campaign, "_kill", lambda run: ended.append((run.name, run.path.exists())))
    with pytest.raises(KeyboardInterrupt):
        campaign.main([CASES["containers"]], 1, 0, 60.0, lambda line: None)
    assert [("calm-containers", True)] == ended


def test_an_unknown_case_is_refused():
    with pytest.raises(UsageError, match="multiworkers"):
        campaign.chosen("fit,multiworkers")


@pytest.mark.parametrize(
    ("values", "failed"),
    [({}, False), ({"lost": "failed: chief: x"}, True), ({"bits": record.CHANGED}, True)],
)
def test_a_lost_run_or_a_changed_bit_fails_the_campaign(values, failed):
    assert failed is campaign.failed([row("fit"), row("one", **values)])


def test_the_table_counts_what_the_record_file_holds(tmp_path):
    rows = [row("fit"), row("fit", lost="no"), row("ps", bits=record.NOT_COMPARED), row("one", bits=record.CHANGED)]
    rows.append(row("fit"))
    for each in rows:
        record.add(each, tmp_path / "storms.jsonl")
    lines = record.table(record.read(tmp_path / "storms.jsonl"))
    assert "| `fit` | 3 | 12 | 1 | 3 | 0 |" in lines
    assert "| `ps` | 1 | 4 | 0 | 0 | 0 |" in lines
    assert "| all | 5 | 20 | 1 | 4 | 1 |" in lines
    assert "| since the last run that was lost or changed | 1 | 4 | 0 | 1 | 0 |" in lines
    assert {f"`{name}`" for name in CASES} <= {line.split(" | ")[0].removeprefix("| ") for line in lines}


def test_the_table_in_the_document_is_the_record_s():
    assert record.table(record.read()) == documents.written(record.PAGE, record.BEGIN)
