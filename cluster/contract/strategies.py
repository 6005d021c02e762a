"""The strategies, one record each in `strategies.toml`. No other code compares a strategy's name.

A new strategy needs a record there, a builder in `train/strategy.py`, tests and documentation.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.system.errors import UsageError, nearest

AUTO = "auto"
"""The name that requests the strategy which suits the topology."""
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Strategy:
    """The properties of a strategy that the rest of the project uses.

    Attributes:
        name: on the command line, a key of `STRATEGIES`.
        class_name: TensorFlow's name for it.
        trial: the options of `up` with which `invoke verify` tests it.
        topology: the supported clusters as options of `up`, for the error message.
        runs_on: the supported clusters, as the minimum and maximum of `workers`, `ps` and `devices` of each.
        automatic: whether `--strategy auto` selects it if no earlier one fits.
        one_process: whether the chief trains alone, in one process.
        served: whether workers run the chief's functions, with weights on parameter servers; each restarts alone.
        synchronous: whether all replicas take part in every step, so that the same topology gives the same bits.
        collective: whether the tasks exchange gradients directly, through all-reduce.
        mirrored: whether every replica has a copy of the weights, whose bits must be equal.
        single_device: whether it has only one replica.
        staged: whether each task, or each device of one task, holds a stage of a model (docs/guides/pipelines.md).
        legacy_fit: whether `Model.fit` must be that of tf_keras, because that of Keras 3 does not support the strategy.
        no_fp16: why it cannot train in float16; empty if it can.
        no_virtual_shards: why it does not support `--bitwise-elastic`; empty if it does.
        layers: the precision in which layers compute regardless of the request; empty for the requested one.
        hardware: the kind of machine that it needs; empty for any.
    """

    name: str
    class_name: str
    trial: str
    topology: str
    runs_on: Sequence[Mapping[str, tuple[int, float]]]
    automatic: bool = False
    one_process: bool = False
    served: bool = False
    synchronous: bool = True
    collective: bool = False
    mirrored: bool = False
    single_device: bool = False
    staged: bool = False
    legacy_fit: bool = False
    no_fp16: str = ""
    no_virtual_shards: str = ""
    layers: str = ""
    hardware: str = ""

    def fits(self, workers: int, ps: int, devices: int) -> bool:
        """Return whether it supports this number of workers, parameter servers, and devices per task."""
        counts = {"workers": workers, "ps": ps, "devices": devices}
        return any(all(low <= counts[of] <= high for of, (low, high) in each.items()) for each in self.runs_on)


_RECORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
STRATEGIES = {name: Strategy(name=name, **record) for name, record in _RECORDS.items()}


def get(name: str) -> Strategy:
    """Return the strategy of that name; raise UsageError if there is none."""
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name!r} is not a strategy{nearest(name, [AUTO, *STRATEGIES])}")
    return STRATEGIES[name]


def requested(name: str) -> Strategy | None:
    """Return the strategy of that name, or None for `auto`; raise UsageError if there is none."""
    return None if name == AUTO else get(name)


def resolve(requested: str, workers: int, ps: int, devices: int) -> Strategy:
    """Return the requested strategy, for `auto` the first that fits; raise UsageError if the topology does not fit."""
    if ps and not workers:
        raise UsageError(f"--ps {ps} with --workers 0: parameter servers need workers; add --workers 2 or drop --ps")
    topology = (workers, ps, devices)
    if requested == AUTO:
        return next(each for each in STRATEGIES.values() if each.automatic and each.fits(*topology))
    strategy = get(requested)
    if not strategy.fits(*topology):
        counts = f"--workers {workers} --ps {ps} --devices {devices}"
        raise UsageError(f"--strategy {requested} cannot run on {counts}: use {strategy.topology}")
    return strategy
