"""Models of other forms than images to classes, killed once: they end with the bits of an undisturbed training."""

import json
import re

import numpy as np
import pytest

from tests.e2e.scenario import ROOT, Clusters, summary

STEPS, KILLED_AT = 40, 25
PARTS = f'''
"""Tokens of a toy language, and the end of the chief's first generation."""

import os
import signal

import numpy as np
from tensorflow import keras


def tokens():
    starts = np.random.default_rng(0).integers(0, 7, (600, 1))
    tokens = ((starts + np.arange(17) ** 2) % 7).astype("int32")
    split = lambda part: (tokens[part, :-1], tokens[part, 1:])
    return {{"train": split(slice(0, 480)), "test": split(slice(480, None)), "classes": list("abcdefg")}}


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() >= {KILLED_AT}:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_once(run_dir, task):
    return [Kill()] if (os.environ["GENERATION"], task) == ("0", "chief") else []


def undisturbed(run_dir, task):
    return []
'''
MODELS = {
    "parcels": "--preset=parcels:preset",
    "words": "--preset=transformer_lm",
    "tuned": "--preset=parcels:preset --init-from=base",
}
TRAINING = {
    "parcels": "",
    "words": "--dataset killed_parts:tokens --transformer.layers 1 --transformer.width 16",
    "tuned": "--freeze seen",
}
TOPOLOGIES = {
    "several": "--workers=1",
    "mirrored": "--workers=0 --devices=2",
    "servers": "--workers=1 --ps=1",  # one worker, so that no two updates cross
}


@pytest.fixture(scope="module")
def own(clusters, tmp_path_factory) -> Clusters:
    """Clusters whose user has the two-input model of the documentation, and prepared data."""
    folder, data = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("data")
    text = (ROOT / "docs" / "guides" / "your-model.md").read_text()
    for name, code in re.findall(r"`(\w+\.py)`[^\n]*:\n\n```python\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(code)
    (folder / "killed_parts.py").write_text(PARTS)
    own = Clusters(clusters.runs_dir, {"PYTHONPATH": str(folder), "DATA_DIR": str(data)})
    for name in ("parcels:data", "killed_parts:tokens"):
        own.invoke("data.prepare", f"--name={name}")
    return own


def words(name: str, options: str, callbacks: str, training: str) -> list[str]:
    up = f"up --name={name} --runtime=local --tensorboard-port=0 {options}"
    steps = f"--max-steps={STEPS} --epochs=100 --global-batch=24 --log-every=1 --steps-per-loop=5 --checkpoint-every=10"
    return f"{up} -- --callbacks=killed_parts:{callbacks} {steps} {training}".split()


def long(*case: str) -> object:
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("model", "topology", "loop"),
    [
        ("parcels", "several", "custom"),
        long("parcels", "mirrored", "custom"),
        long("parcels", "servers", "custom"),
        long("parcels", "several", "fit"),
        long("parcels", "mirrored", "fit"),
        long("words", "several", "fit"),
        long("words", "mirrored", "custom"),
        long("words", "servers", "custom"),
        long("tuned", "several", "custom"),
        long("tuned", "mirrored", "fit"),
        long("tuned", "servers", "custom"),
    ],
)
def test_a_run_that_was_killed_must_end_with_the_same_bits(own, model, topology, loop):
    if model == "tuned" and not own.run("base").ended:
        own.invoke(*words("base", f"{MODELS['parcels']} --workers=0", "undisturbed", "--seed=5"))
    options, name = f"{MODELS[model]} {TOPOLOGIES[topology]} --loop={loop}", f"{model}-{topology}-{loop}"
    own.invoke(*words(f"{name}-whole", options, "undisturbed", TRAINING[model]))
    own.invoke(*words(f"{name}-killed", options, "killed_once", TRAINING[model]))
    run = own.run(f"{name}-killed")
    ended, whole = summary(run), summary(own.run(f"{name}-whole"))
    assert ["chief"] == [restart["task"] for restart in ended["restarts"]]
    assert [] == whole["restarts"]
    assert all(0 < event.step < STEPS for event in run.events() if event.event == "restored")
    assert (STEPS, whole["weights_sha256"]) == (ended["steps"], ended["weights_sha256"])
    assert whole["metrics"] == ended["metrics"]
    losses = own.run(f"{name}-whole").losses()
    assert losses[STEPS] < losses[1]


def test_two_inputs_and_outputs_must_be_evaluated_exported_and_predicted_by_name(own):
    """Of the run in which it was killed, if that was before, or a short one."""
    run = own.run("parcels-several-custom-killed")
    if not run.load_summary():
        own.invoke(*words(run.name, f"{MODELS['parcels']} --workers=0", "undisturbed", "--max-steps=5"))
    metrics = summary(run)["metrics"]
    assert {"eval_kind_accuracy", "eval_price_absolute_error", "eval_price_loss"} <= set(metrics)
    evaluated = json.loads(own.invoke("evaluate", run.name, "--json"))
    assert metrics == pytest.approx({name: evaluated[name] for name in metrics})
    example = run.path / "example.json"
    example.write_text(json.dumps({"picture": np.zeros((8, 8, 1), int).tolist(), "weight": [0.7]}))
    lines = own.invoke("predict", run.name, f"--features={example}").splitlines()
    assert {"book", "shirt", "toy"} == {line.split()[-1] for line in lines if line.startswith("kind:")}
    assert ["price:"] == [line.split()[0] for line in lines if not line.startswith("kind:")]
    example.write_text(json.dumps({"picture": [1, 2], "weight": [0.7]}))
    assert "picture" in own.invoke("predict", run.name, f"--features={example}", expect=2)
