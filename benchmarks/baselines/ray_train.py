"""Ray Train's TensorflowTrainer, as in its guide, on the data and the model of our runs.

The workers' lines go through a file, because Ray adds a prefix to what they print.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

from benchmarks.baselines.common import EVERY, SAVED_EVERY, parser, train_arrays


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Train as one of the workers."""
    import tensorflow as tf

    from benchmarks.baselines.keras_fit import LogSteps, build_and_compile_cnn_model

    tf.config.threading.set_intra_op_parallelism_threads(config["threads"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    images, labels = train_arrays(Path(config["arrays"]))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).repeat()
    with strategy.scope():
        model = build_and_compile_cnn_model(config["learning_rate"], steps_per_execution=config["steps_per_execution"])
    done, callbacks = 0, []
    if config["state"]:
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                model.load_weights(str(Path(folder) / "state"))
                done = int((Path(folder) / "step").read_text())
        callbacks.append(_report_state(model, done))
    output_path = config["output"] if ray.train.get_context().get_world_rank() == 0 else os.devnull
    with Path(output_path).open("a") as output, contextlib.redirect_stdout(output):
        batches = dataset.batch(config["global_batch"]).prefetch(tf.data.AUTOTUNE)
        callbacks.append(LogSteps(config["steps"], done))
        model.fit(batches, steps_per_epoch=config["steps"] - done, verbose=0, callbacks=callbacks)


def _report_state(model: Any, done: int) -> Any:
    """Return a callback that reports the state as in Ray's guide: every worker reports, the first with its files."""
    import tensorflow as tf

    def report(batch: int, logs: object) -> None:  # noqa: ARG001
        step = done + batch + 1
        if step % SAVED_EVERY:
            return
        with tempfile.TemporaryDirectory() as folder:
            model.save_weights(str(Path(folder) / "state"))
            (Path(folder) / "step").write_text(str(step))
            first = ray.train.get_context().get_world_rank() == 0
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if first else None)

    return tf.keras.callbacks.LambdaCallback(on_batch_end=report)


def report_nothing(folder: Path) -> None:
    """Disable Ray's usage report, whatever the caller's environment or `~/.ray/config.json` says."""
    config = folder / "usage.json"
    config.write_text(json.dumps({"usage_stats": False}))
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_USAGE_STATS_CONFIG_PATH=str(config))


def main() -> None:
    """Train."""
    arguments = parser()
    arguments.add_argument("--tasks", type=int, default=1, help="workers to train on (default: 1)")
    arguments.add_argument("--steps-per-execution", type=int, choices=(1, EVERY), default=1, help="of compile")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        output = (options.state or Path(folder)) / "rows.jsonl"
        output.touch()
        report_nothing(Path(folder))
        ray.init(
            num_cpus=options.tasks,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"TF_USE_LEGACY_KERAS": "1", "TF_ENABLE_ONEDNN_OPTS": "1"}},
        )
        trainer = TensorflowTrainer(
            train_loop_per_worker,
            train_loop_config={
                **vars(options),
                "arrays": str(options.arrays),
                "output": str(output),
                "state": bool(options.state),
            },
            scaling_config=ScalingConfig(num_workers=options.tasks, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(-1 if options.state else 0)),
        )
        trainer.fit()
        print(output.read_text(), end="")
        ray.shutdown()


if __name__ == "__main__":
    main()
