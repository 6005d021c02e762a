"""Kept results of trials; `tests/unit/train/startup/test_primitives.py` changes a model's modules."""

import pytest

from cluster.host.launch import trials

COMMAND, RESULT = ["python", "-m", "train.startup.preflight"], {"unverified": []}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"files": 1}', '{"files": {"/nonexistent": "0"}, "result": {}}'])
def test_a_damaged_record_of_a_trial_counts_as_none(tmp_path, damage):
    trials.keep_trial(tmp_path, COMMAND, [], RESULT | {"files": []}, "")
    assert trials.recall_trial(tmp_path, COMMAND, []) == RESULT
    (kept,) = (tmp_path / "trials").iterdir()
    kept.write_text(damage)
    assert trials.recall_trial(tmp_path, COMMAND, []) is None


def test_a_trial_in_another_environment_is_another_one(tmp_path, monkeypatch):
    trials.keep_trial(tmp_path, COMMAND, [], RESULT | {"files": []}, "")
    monkeypatch.setenv("WIDTH_OF_THEIR_MODEL", "64")
    assert trials.recall_trial(tmp_path, COMMAND, []) is None
    assert trials.recall_trial(tmp_path, [*COMMAND, "--replicas=2"], []) is None
