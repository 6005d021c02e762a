"""The settings of the best checkpoint and of early stopping."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.system.errors import UsageError
from train.settings.field_types import check_choice, check_number, check_range

MODES = ("auto", "min", "max")


@dataclass(frozen=True)
class Best:
    """The best checkpoint, which is kept besides the newest ones, and early stopping; in the loop `custom`."""

    metric: str = ""
    """Metric of the evaluations, such as `eval_loss` or `eval_accuracy`, whose best checkpoint is kept in
    `checkpoints/best/`. Empty: none is kept."""

    mode: str = "auto"
    """Whether the smallest (`min`) or the largest (`max`) value is the best; `auto`: the largest for an accuracy, such
    as `eval_accuracy`, the smallest for all others."""

    min_delta: float = 0.0
    """Least improvement of a better value: 0 or more."""

    patience: int = 0
    """Consecutive evaluations without a better value after which training ends; 0: no early stopping."""

    export: bool = False
    """Whether the model is exported from the best checkpoint at the end instead of from the last one."""

    @property
    def sign(self) -> int:
        """1 if larger values are better, -1 if smaller ones are."""
        return 1 if self.mode == "max" or (self.mode == "auto" and self.metric.endswith("_accuracy")) else -1

    def check(self, loop: str) -> None:
        """Check that every value is in its range."""
        check_choice("best.mode", self.mode, MODES)
        check_range("best.patience", self.patience, 0, 10**9)
        check_number("best.min_delta", self.min_delta, "0, or a number above 0", least=0)
        if self.metric and not self.metric.startswith("eval_"):
            raise UsageError(
                f"--best.metric {self.metric!r}: expected one of the evaluations, such as eval_loss or eval_accuracy"
            )
        if not self.metric and (self.patience or self.export):
            setting = f"patience {self.patience}" if self.patience else "export"
            raise UsageError(f"--best.{setting} without --best.metric: add a metric, such as eval_loss")
        if self.metric and loop == "fit":
            raise UsageError(
                f"--best.metric {self.metric} with --loop fit: use Keras's callbacks EarlyStopping and ModelCheckpoint"
            )
