"""A training that ends early on two tasks, keeps its best checkpoint, and another one that begins with its weights."""

import json

import pytest

from tests.e2e.scenario import summary
from train.saving.files import BEST, finished

pytestmark = pytest.mark.usefixtures("data")

WORSE_AT_ONCE = ("--best.metric", "eval_loss", "--best.mode", "max", "--best.patience", "1", "--best.export")
"""The loss falls, so the first evaluation stays the best, and the second ends the training."""


def test_a_run_must_end_early_in_every_task_and_another_begin_with_its_weights(clusters):
    base = clusters.up("base", f"--workers=1 -- --evaluate-every 5 {' '.join(WORSE_AT_ONCE)}")
    assert ("succeeded", 10) == (summary(base)["state"], summary(base)["steps"])
    assert {10} == {beat.step for beat in base.heartbeats().values()}
    assert [5] == [saved.step for saved in finished(base.checkpoints / BEST)]
    assert 5 == json.loads(clusters.invoke("evaluate", "base", "--best", "--json"))["step"]
    tuned = clusters.up("tuned", "--workers=0 --init-from=base -- --max-steps 5 --freeze conv2d*")
    assert "began with 8 of the 8 weights from ckpt-10.index" in (tuned.path / "logs" / "chief.log").read_text()
    assert tuned.losses()[1] < base.losses()[1]


def test_a_best_metric_that_no_evaluation_has_must_be_refused_before_anything_starts(clusters):
    output = clusters.invoke(
        "up",
        "--name=mistyped",
        "--runtime=local",
        "--tensorboard-port=0",
        "--",
        "--best.metric",
        "eval_acuracy",
        expect=2,
    )
    assert "did you mean 'eval_accuracy'?" in output
    assert not clusters.run("mistyped").path.exists()
