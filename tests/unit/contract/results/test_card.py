"""The card in a run's folder: written at the end, removed by a resume, and only text whatever a task wrote."""

import pytest

from cluster.contract.results import summary
from cluster.system.json_files import write_json

EVIL = "x`\n# <script>alert(1)</script> | y\x1b[2J"


def test_a_run_that_ended_has_a_card_until_it_continues(run):
    write_json(run.control / "result.json", {"steps": 7, "metrics": {"eval_accuracy": 0.5}, "weights_sha256": "ab"})
    run.end("succeeded")
    summary.write_summary(run, settle_s=0)
    text = run.card.read_text()
    assert text.startswith("# `demo`: succeeded\n")
    for part in ("`eval_accuracy`: 0.5000", "`ab`", "chief, worker-0", "invoke rerun demo"):
        assert part in text
    write_json(run.config, {"script": "fit.py", "arguments": []})
    summary.write_summary(run, settle_s=0)
    assert "invoke rerun" not in run.card.read_text()
    run.reopen()
    assert not run.card.exists()


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_the_card_of_a_run_that_can_continue_says_so(run, state):
    run.end(state, task="chief", error="no more luck")
    summary.write_summary(run, settle_s=0)
    assert "invoke up --resume demo" in (text := run.card.read_text())
    assert "invoke rerun" not in text
    assert (state == "failed") is ("`no more luck`" in run.card.read_text())


def test_what_tasks_wrote_stays_code(run):
    write_json(run.config, {"global_batch": 96, "model": EVIL, "optimizer": {EVIL: EVIL}})
    write_json(run.manifest, {"code": {"commit": EVIL}})
    restarts = [{"generation": 1, "task": EVIL, "cause": EVIL}]
    value = {"state": "failed", "strategy": EVIL, "restarts": restarts, "cause": {"task": EVIL, "error": EVIL}}
    write_json(run.summary, value | {"metrics": {EVIL: 1.0}})
    lines = summary.card_lines(run, run.load_summary())
    assert not [line for line in lines if line.startswith("# <")]
    for line in lines:
        assert line.isprintable()
        outside = line.split("`")[::2]  # what is between the pairs of quotes
        assert not [part for part in outside if "script" in part]
