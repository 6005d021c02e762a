"""A rehearsed program is as good as a new one: it can form a cluster, and trains to the same bits."""

from dataclasses import replace

from tests.support.measured import measured
from train.config import TrainConfig


def test_a_rehearsal_leaves_nothing_behind_that_changes_the_training():
    assert measured("rehearsal", "new") == measured("rehearsal", "rehearsed")
    assert 1 == measured("rehearsal", "rehearsed")["tasks"]


def test_a_gpu_belongs_to_the_program_that_trains(monkeypatch):
    from train.startup import rehearsal

    assert rehearsal.can_rehearse(TrainConfig())
    assert not rehearsal.can_rehearse(replace(TrainConfig(), loop="fit"))
    monkeypatch.setattr(rehearsal.tf.config, "list_physical_devices", lambda kind: ["GPU:0"] if kind == "GPU" else [])
    assert not rehearsal.can_rehearse(TrainConfig())
