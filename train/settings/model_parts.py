"""The settings of a built-in model and of a model's stages."""

from dataclasses import dataclass

from cluster.system.errors import UsageError
from train.data.arrays import WINDOW
from train.settings.field_types import check_range


@dataclass(frozen=True)
class Transformer:
    """The size of the model `transformer_lm`."""

    layers: int = 4
    """Layers, each with an attention and a feed-forward block; at least 1."""

    width: int = 128
    """Width of the values between layers; a multiple of `heads`."""

    heads: int = 4
    """Heads of each attention; at least 1."""

    context: int = 128
    """Tokens of an example; a divisor of the 1024 bytes of a window of the text."""

    def check(self) -> None:
        """Check that every value is in its range."""
        for name, high in (("layers", 1000), ("heads", 1000), ("width", 2**16)):
            check_range(f"transformer.{name}", getattr(self, name), 1, high)
        if self.width % self.heads:
            raise UsageError(f"--transformer.width {self.width}: expected a multiple of the {self.heads} heads")
        if self.context < 2 or WINDOW % self.context:
            raise UsageError(f"--transformer.context {self.context}: expected a divisor of {WINDOW}, at least 2")


@dataclass(frozen=True)
class Pipeline:
    """How the stages of `--strategy pipeline` work together, see docs/guides/pipelines.md."""

    schedule: str = "gpipe"
    """`gpipe`, `1f1b` or `pipedream`."""

    remat: bool = False
    """Whether a stage keeps only its inputs and computes the rest again for the backward."""

    cut: str = ""
    """The first layer of each stage but the first, separated by commas; empty: the stages of which the largest has the
    fewest floating-point operations."""
