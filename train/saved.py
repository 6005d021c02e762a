"""Uses the checkpoints and exports of a run in one process without a strategy.

python -m train.saved evaluate --run-dir runs/RUN [--data-dir data]
python -m train.saved export   --run-dir runs/RUN [--data-dir data]
python -m train.saved predict  --run-dir runs/RUN --image FILE | --features FILE
python -m train.saved timeline --run-dir runs/RUN --output FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.contract.compatibility import precision_of
from cluster.contract.run.folder import RunFolder
from cluster.system import quiet
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.json_files import read_json
from cluster.system.messages import plain
from cluster.system.terminal import print_lines
from train import prediction
from train.config import TrainConfig
from train.model import variables
from train.pipeline import timeline

if TYPE_CHECKING:
    from tensorflow import keras

    from train.data.sources import Source

RESTORE_TRIES = 5

TO_STDERR = {1: 2}
"""Redirects output of a user's model, because programs read stdout."""


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.saved", description="A run's newest checkpoint, used.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("evaluate", "export", "predict", "timeline"):
        command = commands.add_parser(name)
        command.add_argument("--run-dir", type=Path, required=True, help="run folder")
        command.add_argument("--data-dir", type=Path, default=Path("data"), help="prepared data (%(default)s)")
        if name != "predict":
            command.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
        if name == "evaluate":
            command.add_argument("--json", action="store_true", help="print as JSON")
        if name == "predict":
            example = command.add_mutually_exclusive_group(required=True)
            example.add_argument("--image", type=Path, help="image file to classify")
            example.add_argument("--features", type=Path, help="JSON file of one example")
        if name == "timeline":
            command.add_argument("--output", type=Path, required=True, help="PNG file to write")
    options = parser.parse_args(arguments)
    # Leave the GPUs to training processes.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
    try:
        run = RunFolder(options.run_dir)
        if options.command == "predict":
            with quiet.redirected(TO_STDERR):
                lines = prediction.predict(run, options.image, options.features)
            print("\n".join(lines))
        elif options.command == "timeline":
            step = timeline.save(run, options.output)
            print(f"drew step {step} to {options.output}")
        elif options.command == "evaluate":
            with quiet.redirected(TO_STDERR):
                results = evaluate(run, options.data_dir, best=options.best)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in results.items() if name.startswith("eval_"))
            line = f"step {results['step']}: {shown} over {results['examples']} examples"
            if options.json:
                print(json.dumps(results, indent=2))
            else:
                print_lines(line)
        else:
            with quiet.redirected(TO_STDERR):
                step = export(run, options.data_dir, best=options.best)
            print(f"exported the model after step {step} to {run.export}")
    except ClusterError as error:
        print_lines(f"error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def evaluate(run: RunFolder, data_dir: Path, *, best: bool = False) -> dict[str, Any]:
    """Evaluate a run's newest checkpoint on the whole test split; return its step and the results.

    Raises:
        PrerequisiteError: there is no good checkpoint, or the data is not prepared.
    """
    source, config, model, step = _restore(run, data_dir, as_trained=True, best=best)
    import tensorflow as tf

    from train.context import evaluation_batch, regularization, regularized
    from train.data import sources
    from train.loops import steps
    from train.model import models, objectives

    batch = evaluation_batch(source)
    measure = steps.evaluation(
        None,
        model,
        objectives.of(
            config,
            classifies=source.classifies,
            predicts_text=source.is_text,
            shapes=lambda: (source.label_shape, models.output_shapes(models.call(model, source.feature_shape))),
        ),
        sources.eval_feed(None, source, batch),
        num_examples=source.test_examples,
        batch=batch,
    )
    try:
        results = regularized(measure, lambda: regularization(model))()
    except tf.errors.OpError as error:
        raise sources.explain(error) or error from None
    return {"run": run.name, "step": step, "examples": source.test_examples, **results}


def export(run: RunFolder, data_dir: Path, *, best: bool = False) -> int:
    """Write the SavedModel of a run's newest checkpoint to its `export/`; return the step.

    Raises:
        PrerequisiteError: as for `evaluate`.
    """
    source, _, model, step = _restore(run, data_dir, best=best)
    from train.model import export as exporting

    exporting.export(model, run.export, source.feature_shape, source.named_outputs)
    return step


def _restore(
    run: RunFolder, data_dir: Path, *, as_trained: bool = False, best: bool = False
) -> tuple[Source, TrainConfig, keras.Model, int]:
    """Return a run's data, configuration and model with the newest (or `best`) checkpoint, and its step.

    The model computes in float32, or with `as_trained` in the precision of the run.
    """
    config, cluster = TrainConfig.from_json(read_json(run.config)), run.load_cluster()
    variables.set_defaults(config.onednn)  # as in the training: oneDNN changes bits, in bfloat16 considerably
    if config.needs_tf_keras(cluster.strategy):
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported
    with quiet.imports():
        from train import strategy
        from train.data import sources
        from train.model import models

    source = sources.find(config, data_dir, run)
    with strategy.policy(precision_of(cluster.strategy, config.precision) if as_trained else "fp32"):
        model = models.of(config, source.feature_shape, source.num_outputs)
    return source, config, model, _restore_newest(run, config, model, best=best)


def _restore_newest(run: RunFolder, config: TrainConfig, model: keras.Model, *, best: bool) -> int:
    import tensorflow as tf

    from train.saving import files, weights

    def warn(message: str) -> None:
        print(message, file=sys.stderr)  # standard output may be JSON

    folder = run.checkpoints / files.BEST if best else run.checkpoints
    for _ in range(RESTORE_TRIES):
        newest = files.newest_good(folder, warn)
        if newest is None:
            break
        try:
            weights.read(config, model, newest.prefix)
        except (tf.errors.NotFoundError, FileNotFoundError):
            time.sleep(0.1)  # a newer one has just replaced it
        else:
            return newest.step
    raise PrerequisiteError(f"run {run.name} has no good checkpoint in {folder}; see its log")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # otherwise TensorFlow waits indefinitely at the interpreter's end for a batch from Python
