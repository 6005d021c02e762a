"""The combinations that `up` refuses before any task starts, see docs/internals/differential.md, and names of cases."""

import ast
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from tests.differential.draw import BATCH, Case, draw, own_optimizer


@dataclass(frozen=True)
class Refusal:
    what: str
    applies: Callable[[Case], bool]
    example: Case
    """A case that is refused for this reason alone."""


NORMALIZING = {"batch_norm", "nested", "blocks"}
WITH_STATE = {*NORMALIZING, "counter", "running_mean", "spectral"}


def _has(case: Case, layers: set[str]) -> bool:
    return not layers.isdisjoint(case.layers)


def _piped(case: Case) -> bool:
    return case.strategy == "pipeline"


REFUSALS = (
    Refusal(
        "`--loop fit` with `--strategy pipeline`",
        lambda case: _piped(case) and case.loop == "fit",
        Case(0, strategy="pipeline", stages=2, tasks=1, loop="fit"),
    ),
    Refusal(
        "`--bitwise-elastic` with `--loop fit`",
        lambda case: bool(case.shards) and case.loop == "fit",
        Case(0, shards=2, loop="fit"),
    ),
    Refusal(
        "`--bitwise-elastic` with `--strategy ps` or `pipeline`",
        lambda case: bool(case.shards) and case.strategy in ("ps", "pipeline"),
        Case(0, strategy="pipeline", stages=2, shards=2),
    ),
    Refusal(
        "`--bitwise-elastic V` with more than V replicas",
        lambda case: 0 < case.shards < case.replicas,
        Case(0, strategy="mirrored", replicas=3, shards=2),
    ),
    Refusal(
        "`--micro-batches M` that does not divide the batch of a replica or of a virtual shard",
        lambda case: bool(BATCH // (case.shards or case.replicas) % case.micro_batches),
        Case(0, shards=4, micro_batches=2),
    ),
    Refusal(
        "an optimizer of your own with `--strategy pipeline`",
        lambda case: _piped(case) and own_optimizer(case.optimizer),
        Case(0, strategy="pipeline", stages=2, optimizer="rmsprop"),
    ),
    Refusal(
        "several inputs or outputs with `--strategy pipeline`",
        lambda case: _piped(case) and case.kind == "named",
        Case(0, strategy="pipeline", stages=2, kind="named"),
    ),
    Refusal(
        "a mask that reaches the output with `--strategy pipeline`",
        lambda case: _piped(case) and case.masks_outputs,
        Case(0, strategy="pipeline", stages=2, kind="tags", dtype="int32", masked=True),
    ),
    Refusal(
        "a subclass of `keras.Model` with `--strategy pipeline`",
        lambda case: _piped(case) and "subclass" in case.layers,
        Case(0, strategy="pipeline", stages=2, layers=("subclass",)),
    ),
    Refusal(
        "one loss function for several outputs with `--loop fit`",
        lambda case: case.kind == "named" and case.own_loss and case.loop == "fit",
        Case(0, kind="named", own_loss=True, loop="fit"),
    ),
    Refusal(
        "a `train_step` or `compute_loss` of the model's own with `--loop custom`",
        lambda case: bool(case.own_step) and case.loop == "custom",
        Case(0, own_step="compute_loss"),
    ),
    Refusal(
        "`--micro-batches` with `--loop fit` and a `train_step` or `compute_loss` of the model's own",
        lambda case: bool(case.own_step) and case.loop == "fit" and case.micro_batches > 1,
        Case(0, loop="fit", micro_batches=2, own_step="train_step"),
    ),
    Refusal(
        "`--micro-batches` with `--loop fit` and BatchNormalization on several replicas",
        lambda case: case.loop == "fit" and case.micro_batches > 1 and case.replicas > 1 and _has(case, NORMALIZING),
        Case(0, strategy="mirrored", replicas=2, loop="fit", micro_batches=2, layers=("batch_norm",)),
    ),
    Refusal(
        "`--bitwise-elastic` with a layer that assigns a weight in `call`, such as SpectralNormalization",
        lambda case: bool(case.shards) and "spectral" in case.layers,
        Case(0, shards=2, layers=("spectral",)),
    ),
    Refusal(
        "a layer that assigns a `tf.Variable` in `call`, in a step of several parts or in stages",
        lambda case: "variable" in case.layers and (_piped(case) or case.parts > 1),
        Case(0, strategy="mirrored", replicas=2, layers=("variable",)),
    ),
    Refusal(
        "weights without a gradient with `--strategy pipeline`, as before `keras.ops.stop_gradient`",
        lambda case: _piped(case) and "detached" in case.layers and not case.freeze,
        Case(0, strategy="pipeline", stages=2, layers=("detached",)),
    ),
    Refusal(
        "`--callbacks` with `--strategy pipeline` on several tasks",
        lambda case: _piped(case) and bool(case.callbacks) and case.tasks > 1,
        Case(0, strategy="pipeline", stages=2, tasks=2, callbacks="epochs", steps=6),
    ),
    Refusal(
        "`--schedule pipedream` with `--optimizer.clip-norm`",
        lambda case: case.pipe == "pipedream" and bool(case.clip),
        Case(0, strategy="pipeline", stages=2, pipe="pipedream", clip=0.1),
    ),
    Refusal(
        "`--schedule pipedream` with `--precision fp16`",
        lambda case: case.pipe == "pipedream" and case.precision == "fp16",
        Case(0, strategy="pipeline", stages=2, pipe="pipedream", precision="fp16"),
    ),
    Refusal(
        "`--schedule pipedream` with a layer that assigns a weight in `call`, such as SpectralNormalization",
        lambda case: case.pipe == "pipedream" and "spectral" in case.layers,
        Case(0, strategy="pipeline", stages=2, pipe="pipedream", layers=("spectral",)),
    ),
    Refusal(
        "`--schedule pipedream` with `--remat`",
        lambda case: case.pipe == "pipedream" and case.remat,
        Case(0, strategy="pipeline", stages=2, pipe="pipedream", remat=True),
    ),
    Refusal(
        "`--remat` with a layer that changes its state in `call`, such as BatchNormalization",
        lambda case: _piped(case) and case.remat and _has(case, WITH_STATE),
        Case(0, strategy="pipeline", stages=2, remat=True, layers=("batch_norm",)),
    ),
    Refusal(
        "more `--stages` than the model has blocks",
        lambda case: _piped(case) and case.stages > blocks(case),
        Case(0, strategy="pipeline", stages=3),
    ),
    Refusal(
        "`--precision fp16` with `--strategy ps`",
        lambda case: case.strategy == "ps" and case.precision == "fp16",
        Case(0, strategy="ps", tasks=3, precision="fp16"),
    ),
)


def blocks(case: Case) -> int:
    """Return the places at which the model of a case can begin a stage."""
    weighted = {"layer_norm", "l2", "constraint", "activity", "residual", "nested", "frozen", "spectral"}
    weighted |= {"double", "blocks"}
    state = {"counter", "running_mean"}
    first = 2 if case.kind in ("tokens", "tags") else 1
    return first + len((weighted | state) & set(case.layers)) + ("shared" in case.layers) + 1


def parsed(words: str) -> Case:
    """Return the case of `SEED`, of `SEED:field=value;field=value`, or of the row `refused:NUMBER`."""
    seed, _, changes = words.partition(":")
    if seed == "refused":
        return dataclasses.replace(REFUSALS[int(changes)].example, seed=100_000 + int(changes))
    values = (change.split("=", 1) for change in changes.split(";") if change)
    return dataclasses.replace(draw(int(seed)), **{name: ast.literal_eval(value) for name, value in values})
