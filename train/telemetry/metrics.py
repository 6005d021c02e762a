"""The writer of metrics to a JSON Lines file, TensorBoard and the console."""

import time

import tensorflow as tf

from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import Pace
from cluster.system.json_files import append_json, truncate_json
from train import presets
from train.config import TrainConfig
from train.settings.overrides import flat_settings


def varied(config: TrainConfig) -> dict[str, str | int | float | bool]:
    """Return the settings that differ from the preset's, with names such as `part.setting`.

    A user's preset is compared with the defaults, because its function may be missing or slow.
    """
    preset = presets.load_preset(config.preset) if config.preset in presets.list_presets() else TrainConfig
    defaults = flat_settings(preset().pin(config.threads))
    return {
        name: value
        for name, value in flat_settings(config).items()
        if value != defaults.get(name) and name not in NOT_VARIED and isinstance(value, str | int | float | bool)
    }


NOT_VARIED = {"preset", "threads"}
"""Settings that are recorded separately, or that the machine determines."""


class Metrics:
    """Writes one task's metrics."""

    def __init__(self, run: RunFolder, task: str, *, prints: bool, resumed_at: int = 0) -> None:
        """Open the task's files. With `prints`, as on one task of a cluster, rows are printed, too.

        This generation begins at step `resumed_at`; later rows belong to lost steps and are deleted.
        """
        self._run_name = run.name
        self._rows = run.metrics(task)
        self._prints = prints
        self._board = tf.summary.create_file_writer(str(run.tensorboard(task)))
        last = truncate_json(self._rows, lambda row: records.row(row)["step"] <= resumed_at) or {"step": -1}
        results = {name: value for name, value in last.items() if name.startswith("eval_")}
        self.evaluated = results if last["step"] == resumed_at else {}
        """The results of an evaluation at the step `resumed_at`, by an earlier generation."""

    def log(self, step: int, epoch: float, total: int, values: dict[str, float | None]) -> None:
        append_json(self._rows, {"step": step, "epoch": round(epoch, 4), **values, "time": time.time()})
        numbers = {name: value for name, value in values.items() if value is not None}
        with self._board.as_default(step):
            for name, value in numbers.items():
                group = "perf" if name.endswith("_per_s") else "train"
                tag = name.replace("_", "/", 1) if name.startswith("eval_") else f"{group}/{name}"
                tf.summary.scalar(tag, value)
        if self._prints:
            shown = "  ".join(f"{name} {value:,.{0 if name.endswith('_s') else 4}f}" for name, value in numbers.items())
            print(f"step {step}/{total}  epoch {epoch:.2f}  {shown}", flush=True)

    def shares(self, step: int, pace: Pace) -> None:
        with self._board.as_default(step):
            for name in ("input_share", "busy_share"):
                if (share := getattr(pace, name)) is not None:
                    tf.summary.scalar(f"perf/{name}", share)

    def hparams(self, config: TrainConfig, results: dict[str, float]) -> None:
        """Record the varied settings and the run's results for TensorBoard's HParams tab."""
        # At the end of a run, as it imports 200 modules, a fifteenth of the time that TensorFlow takes.
        from tensorboard.plugins.hparams import api as hparams

        with self._board.as_default(0):
            # By default the name of a trial is a hash of the values, which a rerun shares.
            hparams.hparams({"preset": config.preset, **varied(config)}, trial_id=self._run_name)
            for name, value in results.items():
                tf.summary.scalar(f"hparam/{name}", value)

    def flush(self) -> None:
        self._board.flush()
