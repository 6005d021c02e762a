"""Uses the checkpoints and exports of a run in one process without a strategy.

python -m train.saved_model evaluate --run-dir runs/RUN [--data-dir data]
python -m train.saved_model export   --run-dir runs/RUN [--data-dir data]
python -m train.saved_model predict  --run-dir runs/RUN --image FILE | --features FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.contract.compatibility import precision_of
from cluster.contract.run.folder import RunFolder
from cluster.system import quiet
from cluster.system.errors import ClusterError, PrerequisiteError, UsageError
from cluster.system.json_files import read_json
from cluster.system.messages import plain
from cluster.system.terminal import print_lines
from train import named
from train.config import TrainConfig
from train.startup import preload

if TYPE_CHECKING:
    from tensorflow import keras

    from train.data.sources import Source

RESTORE_TRIES = 5
SHOWN_CLASSES = 3

TO_STDERR = {1: 2}
"""Redirects output of a user's model, because programs read stdout."""


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.saved_model", description="A run's newest checkpoint, used.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("evaluate", "export", "predict"):
        command = commands.add_parser(name)
        command.add_argument("--run-dir", type=Path, required=True, help="run folder")
        command.add_argument("--data-dir", type=Path, default=Path("data"), help="prepared data (%(default)s)")
        if name == "evaluate":
            command.add_argument("--json", action="store_true", help="print as JSON")
        if name == "predict":
            example = command.add_mutually_exclusive_group(required=True)
            example.add_argument("--image", type=Path, help="image file to classify")
            example.add_argument("--features", type=Path, help="JSON file of one example")
    options = parser.parse_args(arguments)
    # Leave the GPUs to training processes.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
    try:
        run = RunFolder(options.run_dir)
        if options.command == "predict":
            with quiet.redirected(TO_STDERR):
                lines = predict(run, options.image, options.features)
            print("\n".join(lines))
        elif options.command == "evaluate":
            with quiet.redirected(TO_STDERR):
                results = evaluate(run, options.data_dir)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in results.items() if name.startswith("eval_"))
            line = f"step {results['step']}: {shown} over {results['examples']} examples"
            if options.json:
                print(json.dumps(results, indent=2))
            else:
                print_lines(line)
        else:
            with quiet.redirected(TO_STDERR):
                step = export(run, options.data_dir)
            print(f"exported the model after step {step} to {run.export}")
    except ClusterError as error:
        print_lines(f"error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def evaluate(run: RunFolder, data_dir: Path) -> dict[str, Any]:
    """Evaluate a run's newest checkpoint on the whole test split; return its step and the results.

    Raises:
        PrerequisiteError: there is no good checkpoint, or the data is not prepared.
    """
    source, config, model, step = _restore(run, data_dir, as_trained=True)
    import tensorflow as tf

    from train.data import sources
    from train.loops.evaluation import new_evaluation
    from train.model import models, objectives

    objective = objectives.of(config, classifies=source.classifies, shapes=lambda: models.example_shapes(model, source))
    try:
        results = new_evaluation(None, model, objective, source)()
    except tf.errors.OpError as error:
        raise sources.explain(error) or error from None
    return {"run": run.name, "step": step, "examples": source.test_examples, **results}


def export(run: RunFolder, data_dir: Path) -> int:
    """Write the SavedModel of a run's newest checkpoint to its `export/`; return the step.

    Raises:
        PrerequisiteError: as for `evaluate`.
    """
    source, _, model, step = _restore(run, data_dir)
    from train.model import export as exporting

    exporting.export(model, run.export, source.feature_shape, source.named_outputs)
    return step


def _restore(
    run: RunFolder, data_dir: Path, *, as_trained: bool = False
) -> tuple[Source, TrainConfig, keras.Model, int]:
    """Return a run's data, configuration and model with the newest checkpoint, and its step.

    The model computes in float32, or with `as_trained` in the precision of the run.
    """
    config, cluster = TrainConfig.from_json(read_json(run.config)), run.load_cluster()
    preload.set_variables(config, cluster.strategy)  # as in the training: oneDNN changes bits, in bfloat16 considerably
    with quiet.imports():
        from train import strategy
        from train.data import sources
        from train.model import models

    source = sources.open_source(config, data_dir, run)
    with strategy.policy(precision_of(cluster.strategy, config.precision) if as_trained else "fp32"):
        model = models.of(config, source.feature_shape, source.num_outputs)
    return source, config, model, _restore_newest(run, config, model)


def _restore_newest(run: RunFolder, config: TrainConfig, model: keras.Model) -> int:
    import tensorflow as tf

    from train.saving import checkpoint_files, saved_weights

    def warn(message: str) -> None:
        print(message, file=sys.stderr)  # standard output may be JSON

    for _ in range(RESTORE_TRIES):
        newest = checkpoint_files.newest_good(run.checkpoints, warn)
        if newest is None:
            break
        try:
            saved_weights.read(config, model, newest.prefix)
        except (tf.errors.NotFoundError, FileNotFoundError):
            time.sleep(0.1)  # a newer one has just replaced it
        else:
            return newest.step
    raise PrerequisiteError(f"run {run.name} has no good checkpoint in {run.checkpoints}; see its log")


def predict(run: RunFolder, image: Path | None, features: Path | None = None) -> list[str]:
    """Return the predictions of the exported model as lines: the likeliest classes first, or the values.

    Args:
        image: image file, or None.
        features: JSON file of one example: nested lists, or a dictionary of them for several inputs.

    Raises:
        PrerequisiteError: the run has no export yet.
        UsageError: the file is not an image or an example that the model takes.
    """
    if not (run.export / "saved_model.pb").exists():
        raise PrerequisiteError(f"run {run.name} has no export yet; wait for its end, or `invoke export {run.name}`")
    with quiet.imports():
        import tensorflow as tf

        from train.model import export as exporting

    serve = tf.saved_model.load(str(run.export)).signatures["serving_default"]
    inputs = serve.structured_input_signature[1]
    if features:
        example = _read_features(features, inputs)
    elif image:
        example = _read_image(run, image, inputs)
    outputs = serve(**example)
    names = read_json(run.export / exporting.CLASSES, [])
    if not isinstance(names, dict):
        return _in_words(next(iter(outputs.values()))[0], names)
    return [f"{head}:{line}" for head in names for line in _in_words(outputs[head][0], names[head])]


def _in_words(outputs: Any, names: Sequence[str] | None) -> list[str]:
    """Return the likeliest classes, or the values if `names` is None."""
    import numpy as np
    import tensorflow as tf

    def row_by_row(values: Any) -> list[str]:
        rows = np.atleast_1d(values).tolist()
        return [f"  {row:.6g}" if isinstance(row, float) else f"  {json.dumps(row)}" for row in rows]

    if names is None or not outputs.shape.rank or outputs.shape[-1] < max(len(names), 2):
        return row_by_row(outputs.numpy())
    if outputs.shape.rank > 2:  # an image or similar: the class of each position
        return row_by_row(tf.argmax(outputs, -1).numpy())
    if outputs.shape.rank == 2:  # a sequence: its last position
        outputs = outputs[-1]
    shares = tf.nn.softmax(outputs).numpy()
    best = np.argsort(-shares)[:SHOWN_CLASSES]
    return [f"{shares[k]:7.2%}  {names[k] if names else f'class {k}'}" for k in best]


def _read_features(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Read one example, a tensor for each input of the model."""
    import numpy as np
    import tensorflow as tf

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--features {path}: {error}; expected a JSON file") from None
    if not isinstance(value, dict) and len(inputs) == 1:
        value = {next(iter(inputs)): value}
    if not isinstance(value, dict) or set(value) != set(inputs):
        actual = f"the features {', '.join(value)}" if isinstance(value, dict) else "one value"
        raise UsageError(f"--features {path}: {actual}; expected a dictionary of {', '.join(inputs)}")

    def tensor(name: str) -> tf.Tensor:
        spec = inputs[name]
        try:
            array = np.asarray(value[name])[np.newaxis]
            if not np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
                raise TypeError
            array = np.asarray(value[name], spec.dtype.as_numpy_dtype)[np.newaxis]
        except (TypeError, ValueError, OverflowError):
            array = np.zeros(0)
        if not spec.shape.is_compatible_with(array.shape):
            expected = f"{spec.dtype.name} of the shape {spec.shape.as_list()[1:]}"
            raise UsageError(f"--features {path}: {name!r} is not {expected}")
        return tf.constant(array)

    return {name: tensor(name) for name in inputs}


def _read_image(run: RunFolder, path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Read an image in the size of the model's input, `[1, H, W, C] float32` of 0 to 255."""
    import numpy as np
    import tensorflow as tf
    from PIL import Image, UnidentifiedImageError

    shapes = {name: spec.shape.as_list() for name, spec in inputs.items()}
    (name, shape), *others = shapes.items()
    if others or len(shape) != 4 or shape[-1] not in (1, 3):
        expected = named.each(str, shapes if others else shape)
        raise UsageError(f"the model of {run.name} takes {expected}, not images; pass an example by --features")
    _, height, width, channels = shape
    try:
        with Image.open(path) as image:
            resized = image.convert("L" if channels == 1 else "RGB").resize((width, height))
    except (OSError, UnidentifiedImageError) as error:
        why = error.strerror or "it is not an image"
        raise UsageError(f"--image {path}: {why}; expected a PNG or JPEG file") from None
    return {name: tf.constant(np.asarray(resized, np.float32).reshape(1, height, width, channels))}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # otherwise TensorFlow waits indefinitely at the interpreter's end for a batch from Python
