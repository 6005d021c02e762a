"""Evaluates, exports or predicts with the trained model of a run, in one process without a strategy.

python -m train.saved_model evaluate --run-dir runs/RUN [--data-dir data]
python -m train.saved_model export   --run-dir runs/RUN [--data-dir data] [--serving FOLDER]
python -m train.saved_model predict  --run-dir runs/RUN --image FILE | --features FILE
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.contract.compatibility import precision_of
from cluster.contract.recovery import checkpoint_files
from cluster.contract.run.folder import RunFolder
from cluster.system import terminal
from cluster.system.errors import EXIT_INTERRUPTED, ClusterError, PrerequisiteError, RunFailed
from cluster.system.json_files import DISK_FULL, read_json
from cluster.system.messages import plain
from cluster.system.terminal import print_lines
from train.config import TrainConfig
from train.startup import preload

if TYPE_CHECKING:
    from tensorflow import keras

    from train.data.sources import Source

RESTORE_TRIES = 5
UNWRITABLE = (*DISK_FULL, errno.EROFS, errno.EACCES)
"""What keeps an export from its folder; TensorFlow's errors have only the text."""


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
        if name == "export":
            command.add_argument("--serving", type=Path, help="folder of a served model, for its next version")
        if name == "predict":
            example = command.add_mutually_exclusive_group(required=True)
            example.add_argument("--image", type=Path, help="image file to classify")
            example.add_argument("--features", type=Path, help="JSON file of one example")
    options = parser.parse_args(arguments)
    # Leave the GPUs to training processes.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
    try:
        run = RunFolder(options.run_dir)
        with terminal.redirected({1: 2}):  # output of a user's model to stderr, because programs read stdout
            if options.command == "predict":
                with terminal.quiet_imports():
                    from train.prediction import predict

                lines = predict(run, options.image, options.features, options.data_dir)
            elif options.command == "evaluate":
                results = evaluate(run, options.data_dir)
                shown = "  ".join(f"{name} {value:.4f}" for name, value in results.items() if name.startswith("eval_"))
                lines = [f"step {results['step']}: {shown} over {results['examples']} examples"]
            else:
                lines = [f"exported the model after step {export(run, options.data_dir)} to {run.export}"]
                if options.serving:
                    from train.model.export import add_version

                    lines.append(f"version {add_version(run.export, options.serving)} of {options.serving}")
    except ClusterError as error:
        print_lines(f"error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    if options.command != "evaluate":
        print("\n".join(lines))
    elif options.json:
        print(json.dumps(results, indent=2))
    else:
        print_lines(*lines)
    return 0


def evaluate(run: RunFolder, data_dir: Path) -> dict[str, Any]:
    """Evaluate a run's newest intact checkpoint on the whole test split; return its step and the results."""
    source, config, model, step = _restore(run, data_dir, as_trained=True)
    import tensorflow as tf

    from train.data import opening
    from train.loops.evaluation import new_evaluation
    from train.model import models, objectives

    objective = objectives.build_configured(
        config, classifies=source.classifies, shapes=lambda: models.example_shapes(model, source)
    )
    try:
        results = new_evaluation(None, model, objective, source, config.evaluation_batch)()
    except tf.errors.OpError as error:
        raise opening.explain(error) or error from None
    return {"run": run.name, "step": step, "examples": source.test_examples, **results}


def export(run: RunFolder, data_dir: Path) -> int:
    """Write the SavedModel of a run's newest checkpoint to its `export/`; return the step. Raises like `evaluate`."""
    source, _, model, step = _restore(run, data_dir)
    import tensorflow as tf

    from train.model import export as exporting

    try:
        exporting.export(model, run.export, source.feature_shape, source.named_outputs)
    except (OSError, tf.errors.OpError) as error:
        reason = next((text for text in map(os.strerror, UNWRITABLE) if text in str(error)), None)
        if reason is None:
            raise
        raise RunFailed(f"{run.export} cannot be written ({reason}); correct that, then export again") from None
    return step


def _restore(
    run: RunFolder, data_dir: Path, *, as_trained: bool = False
) -> tuple[Source, TrainConfig, keras.Model, int]:
    """Return a run's data, configuration, model with the newest weights, in float32 or `as_trained`, and their step."""
    config, cluster = TrainConfig.from_json(read_json(run.config)), run.load_cluster()
    preload.set_variables(config, cluster.strategy)  # as in the training: oneDNN changes bits, in bfloat16 considerably
    with terminal.quiet_imports():
        import tensorflow as tf
        from tensorflow import keras

        from train import patches, strategy
        from train.data import opening
        from train.model import models
        from train.model.export import is_legacy
        from train.patches import placed_seeds
        from train.pipeline import stage_models
        from train.saving import saved_weights

    tf.get_logger().setLevel("ERROR")  # after a refusal it warns of each value in the checkpoint
    patches.apply(patches.LEGACY if is_legacy() else patches.TRAINING)
    placed_seeds.make_unseeded(config.seed)
    source = opening.open_source(config, data_dir, run)
    new_model = partial(models.build_configured, config, source.feature_shape, source.num_outputs)
    precision = precision_of(cluster.strategy, config.precision)
    with strategy.precision_policy(precision if as_trained else "fp32"):
        model, policy = new_model(), keras.mixed_precision.global_policy().name
    built = None if as_trained else stage_models.as_trained(new_model, precision)
    if not as_trained and policy != "float32":  # which the user's module has set
        model, built = new_model(), model
    warn = partial(print, file=sys.stderr)  # standard output may be JSON
    for _ in range(RESTORE_TRIES):
        newest = checkpoint_files.find_newest_good(run.checkpoints, warn)
        if newest is None:
            break
        try:
            saved_weights.load_evaluated(config, model, newest.prefix, built)
        except (tf.errors.NotFoundError, FileNotFoundError):
            time.sleep(0.1)  # a newer one has just replaced it
        else:
            return source, config, model, newest.step
    raise PrerequisiteError(f"run {run.name} has no intact checkpoint in {run.checkpoints}; see its log")


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # the task that started this reports it
        code = EXIT_INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # otherwise TensorFlow waits indefinitely for a batch from Python at interpreter exit
