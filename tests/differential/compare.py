"""Runs a case's file with plain Keras and compares what it gives with what a run of ours has left.

python -m tests.differential.compare FILE RUN RESULT
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cluster.contract.recovery import checkpoint_files
from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json_lines
from tests.differential.draw import CANCELLED
from train.saving.trees import parts_of_model


def main(file: str, run_dir: str, result: str, twin: str = "") -> None:
    run = RunFolder(Path(run_dir))
    found: dict[str, Any] = {"bits": different(run, RunFolder(Path(twin))) if twin else []}
    if "Dropout" not in Path(file).read_text():  # it draws other numbers in plain Keras
        found |= with_keras(file, run)
    Path(result).write_text(json.dumps(found))


def with_keras(file: str, run: RunFolder) -> dict[str, Any]:
    """Return how far apart plain Keras and a run are: losses, scores, evaluations, weights and optimizer."""
    sys.argv = [file]
    keras = runpy.run_path(file, run_name="__main__")
    net, optimizer = keras["net"], keras["opt"]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rows = list(read_json_lines(run.metrics("chief")))
    steps = {row["step"]: row for row in rows if "loss" in row}
    newest = checkpoint_files.find_newest_good(run.checkpoints, print)
    assert newest is not None
    found: dict[str, Any] = {"step": newest.step}
    if "losses" in keras:
        score = next(name for name in steps[1] if name.endswith(("accuracy", "absolute_error")))
        found["losses"] = relative(keras["losses"], [steps[at + 1]["loss"] for at in range(len(keras["losses"]))])
        if keras["scores"]:
            found["scores"] = relative(keras["scores"], [steps[at + 1][score] for at in range(len(keras["scores"]))])
    again = keras["model"](keras["shapes"], keras["counts"])
    again(keras["pick"](keras["test"][0], slice(1)))
    for variable, kept in zip(again.variables, net.variables, strict=True):
        variable.trainable = kept.trainable
    tf.train.Checkpoint(**parts_of_model(again)).read(newest.prefix).assert_existing_objects_matched()
    half = "mixed_" in Path(file).read_text()  # its rounding alone moves a bias of 0.01 by half
    found["weights"] = {
        expected.path: relative(expected.numpy(), variable.numpy(), 0.1 if half and "bias" in expected.path else 1e-2)
        for expected, variable in zip(net.variables, again.variables, strict=True)
        if "seed_generator" not in expected.path
    }
    set_by_callbacks = "callbacks" in keras
    inner_again = keras["made"](0.1 if set_by_callbacks else tf.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 1))
    inner_again.build(again.trainable_variables)
    tf.train.Checkpoint(optimizer=inner_again).read(newest.prefix).assert_existing_objects_matched()
    kept, kept_again = (
        [variable for variable in one.variables if "learning_rate" not in variable.path] for one in (inner, inner_again)
    )
    found["optimizer"] = {
        expected.path: relative(expected.numpy(), variable.numpy(), 0.1 if half and "bias" in expected.path else 1e-3)
        for expected, variable in zip(kept, kept_again, strict=True)
    }
    if not isinstance(inner, tf.keras.optimizers.SGD):
        for expected, variable in zip([*net.variables, *kept], [*again.variables, *kept_again], strict=True):
            if expected.path.endswith(CANCELLED):
                expected.assign(variable)
    ours = [row for row in rows if row["step"] == newest.step and "eval_loss" in row][-1]
    outputs, values = evaluated(keras)
    found |= {name: relative(value, ours[name]) for name, value in values.items() if name in ours}
    exported = tf.nest.flatten(served(run, keras["test"][0]))
    found["exports"] = max(map(relative, tf.nest.flatten(outputs), exported))
    return found


def served(run: RunFolder, features: Any) -> Any:
    """Return the outputs of a run's export for features."""
    model = tf.saved_model.load(str(run.export))
    (specs, *_), _ = model.serve.concrete_functions[0].structured_input_signature
    return model.serve(tf.nest.map_structure(lambda array, spec: tf.cast(array, spec.dtype), features, specs))


def evaluated(keras: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """Return outputs and values of plain Keras on the test split, with the averages of the weights if it has them."""
    net, optimizer, (x, y, *_) = keras["net"], keras["opt"], keras["test"]
    inner, weights = getattr(optimizer, "inner_optimizer", optimizer), net.trainable_variables
    before = [variable.numpy() for variable in weights]
    if inner.use_ema:
        for variable, mean in zip(weights, inner._model_variables_moving_average, strict=True):
            variable.assign(mean)
    x, y = keras["pick"]((x, y), slice(None))
    outputs = net(x, training=False)
    regularization = sum(float(each.regularizer(each)) for each in weights if each.regularizer)
    found = {"eval_loss": float(keras["value"](y, outputs)) + regularization}
    if net.loss is not None:
        logs = net.evaluate(x, y, batch_size=len(tf.nest.flatten(y)[0]), verbose=0, return_dict=True)
        found |= {"eval_" + name.removeprefix("mean_"): value for name, value in logs.items() if name != "loss"}
    if "metrics" in keras:
        found |= {f"eval_{name}": float(tf.reduce_mean(of(y, outputs))) for name, of in keras["metrics"]().items()}
    for variable, value in zip(weights, before, strict=True):
        variable.assign(value)
    return outputs, found


def different(run: RunFolder, twin: RunFolder) -> list[str]:
    """Return the names of losses, scores, evaluations and variables of the last checkpoints that differ in a bit."""
    names = ("loss", "eval_loss", "accuracy", "absolute_error")
    logs = []
    for of in (run, twin):
        rows = read_json_lines(of.metrics("chief"))
        logs.append({(row["step"], name): row[name] for row in rows for name in names if name in row})
    found = [f"{name} at {step}" for step, name in logs[0] if logs[0][step, name] != logs[1].get((step, name))]
    if run.load_cluster().stages != twin.load_cluster().stages:  # each reports a share of the loss
        found = []
    one, other = (
        tf.train.load_checkpoint(checkpoint_files.find_newest_good(of.checkpoints, print).prefix) for of in (run, twin)
    )
    for name in one.get_variable_to_shape_map():
        if name.startswith(("_CHECKPOINT", "callbacks")):
            continue
        values = [np.asarray(of.get_tensor(name)) for of in (one, other) if of.has_tensor(name)]
        if len({value.tobytes() for value in values}) != 1 or len(values) != 2:
            found.append(name)
    return found


def relative(expected: Any, found: Any, least: float = 1e-6) -> float:
    """Return the largest difference relative to the largest number, and to no less than `least`."""
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    if expected.size == 0:
        return 0.0
    return float(np.max(np.abs(expected - found)) / max(least, float(np.max(np.abs(expected)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
