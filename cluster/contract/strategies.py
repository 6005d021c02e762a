"""The strategies: one record each. Nothing else compares a strategy's name.

A new strategy needs a record here, a builder in `train/strategy.py`, tests and documentation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.system.errors import UsageError, nearest

AUTO = "auto"
"""Requests the strategy that the topology chooses."""
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Strategy:
    """The properties of a strategy that the rest of the project uses.

    Attributes:
        name: on the command line, a key of `STRATEGIES`.
        class_name: TensorFlow's name for it.
        trial: the options of `up` with which `invoke verify` tries it.
        topology: the requirements of `fits` as options of `up`, for the error message.
        fits: whether it runs on a topology: (workers, parameter servers, devices) -> bool.
        chosen: whether `--strategy auto` takes it for such a topology, of those that fit.
        one_process: whether the chief trains alone, in one process.
        served: whether workers run what the chief sends, with the weights on parameter servers; each restarts alone.
        synchronous: whether all replicas take part in every step, so that the same topology gives the same bits.
        collective: whether the tasks exchange gradients directly, through all-reduce.
        mirrored: whether every replica has a copy of the weights, whose bits must be equal.
        single_device: whether it has one replica only.
        staged: whether each task, or each device of one task, holds a stage of a model (docs/guides/pipelines.md).
        legacy_fit: whether `Model.fit` must be that of tf_keras, because Keras 3's own does not know the strategy.
        no_fp16: why it cannot train in float16; empty where it can.
        no_virtual_shards: why it has no `--bitwise-elastic`; empty where it has.
        layers: the precision that its layers compute in whatever was requested; empty: the requested one.
        hardware: the kind of machine without which it cannot run; empty where any will do.
    """

    name: str
    class_name: str
    trial: str
    topology: str
    fits: Callable[[int, int, int], bool]
    chosen: Callable[[int, int, int], bool] = lambda workers, ps, devices: False
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


def _alone(workers: int, ps: int, devices: int) -> bool:  # noqa: ARG001  # any number of devices will do
    return not workers and not ps


STRATEGIES: dict[str, Strategy] = {
    record.name: record
    for record in (
        Strategy(
            name="one",
            class_name="OneDeviceStrategy",
            trial="",
            topology="--workers 0 --ps 0 --devices 1",
            fits=lambda workers, ps, devices: _alone(workers, ps, devices) and devices == 1,
            chosen=lambda workers, ps, devices: True,
            one_process=True,
            single_device=True,
        ),
        Strategy(
            name="mirrored",
            class_name="MirroredStrategy",
            trial="--devices 2",
            topology="--workers 0 --ps 0",
            fits=_alone,
            chosen=lambda workers, ps, devices: devices > 1,
            one_process=True,
            mirrored=True,
        ),
        Strategy(
            name="central",
            class_name="CentralStorageStrategy",
            trial="--devices 2",
            topology="--workers 0 --ps 0",
            fits=_alone,
            one_process=True,
        ),
        Strategy(
            name="multiworker",
            class_name="MultiWorkerMirroredStrategy",
            trial="--workers 1",
            topology="--workers 1 or more and --ps 0",
            fits=lambda workers, ps, devices: workers >= 1 and not ps,
            chosen=lambda workers, ps, devices: True,
            collective=True,
            mirrored=True,
        ),
        Strategy(
            name="ps",
            class_name="ParameterServerStrategy",
            trial="--workers 2 --ps 1",
            topology="--workers 1 or more and --ps 1 or more",
            fits=lambda workers, ps, devices: workers >= 1 and ps >= 1,
            chosen=lambda workers, ps, devices: True,
            served=True,
            synchronous=False,
            legacy_fit=True,
            no_fp16="has workers that would each change the one loss scale",
            no_virtual_shards="is asynchronous",
        ),
        Strategy(
            name="tpu",
            class_name="TPUStrategy",
            trial="",
            topology="--workers 0 --ps 0",
            fits=_alone,
            one_process=True,
            no_fp16="has no float16",
            no_virtual_shards="has never been tried with it",
            layers="bf16",
            hardware="tpu",
        ),
        Strategy(
            name="pipeline",
            class_name="Pipeline",
            trial="--workers 1",
            topology="--workers 1 or more with --devices 1, or --workers 0 with any --devices, and --ps 0",
            fits=lambda workers, ps, devices: not ps and (not workers or devices == 1),
            collective=True,
            staged=True,
            no_virtual_shards="has micro-batches instead, whose bits depend on no number of stages",
        ),
    )
}
"""Every strategy by its name on the command line."""


def get(name: str) -> Strategy:
    """Return the strategy of that name; raise UsageError if there is none."""
    if name not in STRATEGIES:
        raise UsageError(f"--strategy {name!r} is not a strategy{nearest(name, [AUTO, *STRATEGIES])}")
    return STRATEGIES[name]


def requested(name: str) -> Strategy | None:
    """Return the strategy of that name, or None for `auto`; raise UsageError if there is none."""
    return None if name == AUTO else get(name)


def resolve(requested: str, workers: int, ps: int, devices: int) -> Strategy:
    """Return the requested strategy, or the topology's for `auto`; raise UsageError if the topology cannot run it."""
    if ps and not workers:
        raise UsageError(f"--ps {ps} with --workers 0: parameter servers need workers; add --workers 2 or drop --ps")
    topology = (workers, ps, devices)
    if requested == AUTO:
        return next(each for each in STRATEGIES.values() if each.fits(*topology) and each.chosen(*topology))
    strategy = get(requested)
    if not strategy.fits(*topology):
        raise UsageError(
            f"--strategy {requested} cannot run on --workers {workers} --ps {ps} --devices {devices}: "
            f"use {strategy.topology}"
        )
    return strategy
