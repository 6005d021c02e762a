"""The parts of a configuration - optimizer, built-in model, stages - and the checks of its fields.

Losses, weights and classes of a model with several outputs are given by head:

    --loss kind=sparse_categorical_crossentropy,price=mean_squared_error --loss-weights price=0.1
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from cluster.contract import compatibility
from cluster.system.errors import UsageError, nearest
from cluster.system.messages import plain
from train.data.dataset_record import WINDOW

OPTIMIZERS = ("adam", "adamw", "lamb", "lion", "sgd")
SCHEDULES = ("constant", "cosine", "linear")
EXPECTED = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}


def check_types(config: Any, where: str = "", prefix: str = "") -> None:
    """Check that every field of a dataclass has a value of its type; a float field may hold an int."""
    for name, hint in get_type_hints(type(config)).items():
        value, field = getattr(config, name), prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if type(value) is not hint:
                raise UsageError(f"{where}{field}={shown(value)}: expected a {hint.__module__}.{hint.__qualname__}")
            check_types(value, where, f"{field}.")
            continue
        kinds = get_args(hint) or (hint,)
        # The exact type: True is an int in Python, and NumPy's numbers cannot be written as JSON.
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            raise UsageError(f"{where}{field}={shown(value)}: expected {' or '.join(EXPECTED[kind] for kind in kinds)}")


def shown(value: Any) -> str:
    """Return a value and its type for messages, even if its `repr` fails."""
    try:
        text = repr(value)
    except Exception:
        text = "..."
    return plain(f"{text[:80]} ({type(value).__qualname__})")


def option(name: str) -> str:
    """Return the option of a field, such as `--global-batch` of `global_batch`."""
    return "--" + name.replace("_", "-")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Check that a field's whole number is in its range."""
    if not low <= value <= high:
        raise UsageError(f"{option(name)} {value}: expected a whole number from {low} to {high}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Check that a field's text is one of its choices."""
    if value not in choices:
        raise UsageError(f"{option(name)} {value!r}{nearest(value, choices)}")


def check_number(name: str, value: float, expected: str, *, valid: bool) -> None:
    """Check that a field's number is finite and `valid`, as `expected` describes."""
    if not (math.isfinite(value) and valid):
        raise UsageError(f"{option(name)} {value:g}: expected {expected}")


@dataclass(frozen=True)
class Optimizer:
    """Settings of the optimizer, which `train/model/optimizers.py` builds."""

    name: str = "adam"
    """`adam`, `adamw`, `lamb`, `lion`, `sgd`, or `package.module:function`: (learning rate) -> Keras optimizer."""

    learning_rate: float = 2e-3
    """Learning rate, above 0."""

    warmup_steps: int = 100
    """Warm-up steps, over which the learning rate grows from near 0: 0 or more. Without them, Adam's large first steps
    magnify rounding differences of sums, so that runs on 1 and on 3 tasks diverge at once. There is no warm-up with
    callbacks and the `constant` schedule, because callbacks may set the learning rate."""

    schedule: str = "constant"
    """Schedule of the learning rate after the warm-up: `constant`, or a decay to `end_share` over `decay_steps`:
    `cosine` or `linear`."""

    decay_steps: int = 0
    """Steps after the warm-up in which the learning rate decays; 0: all remaining steps of the training."""

    end_share: float = 0.0
    """Final share of the learning rate for `cosine` and `linear`, 0 to 1."""

    momentum: float = 0.9
    """For `sgd`: momentum, the share of the previous update that is kept, 0 to 1."""

    nesterov: bool = False
    """For `sgd`: whether to use Nesterov momentum."""

    weight_decay: float | None = None
    """Decoupled weight decay: the share of each weight, times the learning rate, that every step subtracts; 0 or more.
    None: Keras's default, which is 0.004 for `adamw` and no decay for the others."""

    no_decay: str = ""
    """Weights without decay: regular expressions, separated by commas, searched for in their paths, such as
    `bias,norm`. Empty: all weights decay, as in Keras."""

    ema: float = 0.0
    """Decay of the exponential moving average of the weights, 0 to below 1, such as 0.999; 0: no average."""

    ema_evaluate: bool = True
    """Whether evaluations and exports use the averages instead of the weights."""

    scaling: str = "none"
    """Scaling of `learning_rate` from `base_batch` to the global batch: `none`; `linear`: by their ratio (Goyal et al.
    2017, arXiv:1706.02677); `sqrt`: by its square root (Krizhevsky 2014, arXiv:1404.5997)."""

    base_batch: int = 256
    """Global batch for which `learning_rate` is given, if `scaling` is not `none`; at least 1."""

    clip_norm: float = 0.0
    """Global norm to which the gradient of the global batch is clipped, after the sum over replicas; 0: no clipping."""

    @property
    def own(self) -> bool:
        """Whether a user's function builds the optimizer."""
        return ":" in self.name

    def check(self) -> None:
        """Check that every value is in its range."""
        if not self.own:
            check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_choice("optimizer.schedule", self.schedule, SCHEDULES)
        check_choice("optimizer.scaling", self.scaling, compatibility.SCALINGS)
        for name, low, high in (("warmup_steps", 0, 10**9), ("decay_steps", 0, 10**12), ("base_batch", 1, 2**31 - 1)):
            check_range(f"optimizer.{name}", getattr(self, name), low, high)
        rate, decay = self.learning_rate, self.weight_decay or 0.0
        check_number("optimizer.learning_rate", rate, "a number above 0", valid=rate > 0)
        for name in ("momentum", "end_share"):
            share = getattr(self, name)
            check_number(f"optimizer.{name}", share, "a number from 0 to 1", valid=0 <= share <= 1)
        check_number("optimizer.clip_norm", self.clip_norm, "0, or a number above 0", valid=self.clip_norm >= 0)
        check_number("optimizer.weight_decay", decay, "0, or a number above 0", valid=decay >= 0)
        check_number("optimizer.ema", self.ema, "a number from 0 to below 1, such as 0.999", valid=0 <= self.ema < 1)
        for name in ("weight_decay", "no_decay", "ema", "nesterov"):
            value = getattr(self, name)
            option = f"--optimizer.{name.replace('_', '-')}"
            if value and self.own:
                raise UsageError(f"{option} {value} with --optimizer.name {self.name}: set it in that function")
        if self.nesterov and self.name != "sgd":
            raise UsageError(f"--optimizer.nesterov with --optimizer.name {self.name}: it is for sgd; omit it")


@dataclass(frozen=True)
class Transformer:
    """The size of the model `transformer_lm`."""

    layers: int = 4
    """Layers, each with an attention and a feed-forward block; at least 1."""

    width: int = 128
    """Width of the activations between layers; a multiple of `heads`."""

    heads: int = 4
    """Heads of each attention layer; at least 1."""

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
    """Rematerialization: whether a stage keeps only its inputs and recomputes the rest for the backward pass."""

    cut: str = ""
    """The first layer of each stage after the first, separated by commas; empty: the cut whose largest stage has the
    fewest floating-point operations."""


def parse_losses(text: str) -> dict[str, str]:
    """Return the loss of each head that `--loss` names; the loss of all heads or of a single output has the key ""."""
    return _by_head("--loss", text, str, "head=loss") if "=" in text else {"": text}


def parse_weights(text: str) -> dict[str, float]:
    """Return the factors of the heads' losses that `--loss-weights` names."""
    return _by_head("--loss-weights", text, _weight, "head=number, from 0") if text else {}


def parse_outputs(text: str) -> dict[str, int]:
    """Return the number of classes of each head that `--num-outputs` names; that of a single output has the key ""."""
    if "=" in text:
        return _by_head("--num-outputs", text, _class_count, "head=classes")
    return {"": int(text)} if text.isdecimal() and int(text) > 0 else {}


def check_heads(option: str, named: Iterable[str], heads: Iterable[str]) -> None:
    """Check that the data has labels for every head that an option names."""
    known = list(heads)
    for name in named:
        if name not in known:
            raise UsageError(f"{option} {name!r}: the labels have no such head{nearest(name, known)}")


def _by_head(option: str, text: str, convert: Callable[[str], Any], expected: str) -> dict[str, Any]:
    by_head: dict[str, Any] = {}
    for part in text.split(","):
        head, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            if not (head and equals and value) or head in by_head:
                raise ValueError
            by_head[head] = convert(value)
        except ValueError:
            raise UsageError(f"{option} {part.strip()!r}: expected {expected}, each head once, with commas") from None
    return by_head


def _class_count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _weight(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value
