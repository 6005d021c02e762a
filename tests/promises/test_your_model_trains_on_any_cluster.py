"""A user's models train on several tasks: the very files of docs/guides/your-model.md and examples/models."""

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.scenario import ROOT, Clusters, summary

TOPOLOGIES = {
    "MirroredStrategy": "--workers=0 --devices=2",
    "MultiWorkerMirroredStrategy": "--workers=1",
    "ParameterServerStrategy": "--workers=2 --ps=1",
}
SIGNATURE = """
import sys
import tensorflow as tf
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(*[spec.dtype.name for spec in tf.nest.flatten([serve.structured_input_signature, serve.structured_outputs])])
"""
ALL_STEPS = ("--steps-per-loop", "20")


@pytest.fixture(scope="module")
def own(clusters, tmp_path_factory) -> Clusters:
    """Clusters of a user who has the files of the documentation in a folder."""
    text = (ROOT / "docs" / "guides" / "your-model.md").read_text()
    modules = dict(re.findall(r"`(\w+)\.py`[^\n]*:\n\n```python\n(.*?)```", text, re.DOTALL))
    modules |= {path.stem: path.read_text() for path in (ROOT / "examples" / "models").glob("*.py")}
    return clusters.with_modules(tmp_path_factory.mktemp("own"), own_data=True, **modules)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["MultiWorkerMirroredStrategy", "MirroredStrategy", "ParameterServerStrategy"])
def test_a_small_resnet_must_learn_under(own, strategy):
    words = ("--preset=small_resnet:preset", TOPOLOGIES[strategy])
    ended = summary(own.up(f"small_resnet-{strategy}", *words, training=ALL_STEPS))
    assert ("succeeded", strategy) == (ended["state"], ended["strategy"])
    assert ended["metrics"]["eval_accuracy"] > 0.9


@pytest.mark.long
def test_a_resnet_must_give_the_same_bits_again(own):
    """Its branches run concurrently, and not every library computes its convolutions the same twice."""
    own.rerun("small_resnet-MirroredStrategy", "--runtime=local")


@pytest.mark.extended
def test_bfloat16_must_learn_and_export_float32(own):
    """A model that knows nothing of precisions; a later evaluation gives the same results as that of the training."""
    optimizer = "--optimizer.clip-norm 0.5 --optimizer.ema 0.5 --optimizer.schedule cosine --optimizer.end-share 0.5"
    words = ("--preset=plants:preset --workers=1 --precision=bf16 -- --evaluate-every 1000", optimizer)
    half = own.up("half", *words, training=ALL_STEPS)
    metrics = summary(half)["metrics"]
    assert {"eval_loss", "eval_absolute_error"} == set(metrics)
    assert metrics["eval_absolute_error"] < 0.25  # heights lie between 0 and 5
    evaluated = json.loads(own.invoke("evaluate", "half", "--json"))
    assert ("half", summary(half)["steps"]) == (evaluated["run"], evaluated["step"])
    assert metrics == pytest.approx({name: evaluated[name] for name in metrics})
    shown = subprocess.check_output([sys.executable, "-c", SIGNATURE, str(half.export)], text=True)
    assert ["float32", "float32"] == shown.split()
