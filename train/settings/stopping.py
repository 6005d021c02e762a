"""The settings of the best checkpoint and of early stopping."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.system.errors import UsageError
from train.settings.field_types import check_choice, check_number, check_range

MODES = ("auto", "min", "max")


@dataclass(frozen=True)
class Best:
    """Which checkpoint is kept beside the newest ones, and when training ends early; in the loop `custom`."""

    metric: str = ""
    """Of the evaluations, such as `eval_loss` or `eval_accuracy`: the checkpoint where it is best is kept in
    `checkpoints/best/`. Empty: none is."""

    mode: str = "auto"
    """Whether the least (`min`) or the largest (`max`) value is the best; `auto`: the largest of an accuracy, such as
    `eval_accuracy`, the least of all others."""

    min_delta: float = 0.0
    """By how much a value must be better to count as such: 0 or more."""

    patience: int = 0
    """Evaluations in a row without a better value after which training ends; 0: it does not."""

    export: bool = False
    """Whether the model is exported from the best checkpoint at the end instead of from the last one."""

    @property
    def sign(self) -> int:
        """1 where larger values are better, -1 where smaller ones are."""
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
            given = f"patience {self.patience}" if self.patience else "export"
            raise UsageError(f"--best.{given} without --best.metric: say which metric, such as eval_loss")
        if self.metric and loop == "fit":
            raise UsageError(
                f"--best.metric {self.metric} with --loop fit: use Keras's callbacks EarlyStopping and ModelCheckpoint"
            )
