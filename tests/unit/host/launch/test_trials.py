"""Kept results of trials; `tests/unit/train/startup/test_primitives.py` changes a model's modules."""

import pytest

from cluster.host.launch import configuration

COMMAND, RESULT = ["python", "-m", "train.startup.preflight"], {"unverified": []}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"files": 1}', '{"files": {"/nonexistent": "0"}, "result": {}}'])
def test_a_damaged_record_of_a_trial_counts_as_none(tmp_path, damage):
    kept = configuration.locate_trial(tmp_path, COMMAND, [])
    configuration.keep_trial(kept, 0.0, RESULT | {"files": []}, "")
    assert configuration.recall_trial(kept) == RESULT
    kept.write_text(damage)
    assert configuration.recall_trial(kept) is None


def test_a_trial_in_another_environment_is_another_one(tmp_path, monkeypatch):
    configuration.keep_trial(configuration.locate_trial(tmp_path, COMMAND, []), 0.0, RESULT | {"files": []}, "")
    monkeypatch.setenv("WIDTH_OF_THEIR_MODEL", "64")
    assert configuration.recall_trial(configuration.locate_trial(tmp_path, COMMAND, [])) is None
    assert configuration.recall_trial(configuration.locate_trial(tmp_path, [*COMMAND, "--replicas=2"], [])) is None


def test_a_trial_during_which_a_module_was_edited_is_not_kept(tmp_path):
    module, kept = tmp_path / "model.py", configuration.locate_trial(tmp_path, COMMAND, [])
    module.touch()
    written = module.stat().st_mtime
    configuration.keep_trial(kept, written - 1, RESULT | {"files": [str(module)]}, "")
    assert configuration.recall_trial(kept) is None
    configuration.keep_trial(kept, written + 1, RESULT | {"files": [str(module)]}, "")
    assert configuration.recall_trial(kept) == RESULT
