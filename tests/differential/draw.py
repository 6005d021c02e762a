"""Draws a case, a model with its data and settings, from a seed, and writes it as one Python file.

Our trainer imports the file as a user's module; run as a program, it trains the same model with plain Keras.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

BATCH, TRAIN, TEST = 12, 36, 20
SCALE = 1024.0
"""First scale of losses in float16. The usual one overflows, so that ours and Keras would skip different steps."""

KINDS = ("vector", "image", "segments", "pictures", "tokens", "tags", "sequence", "spans", "named")
"""What the data is: `segments`, `pictures`, `tags` and `spans` have a label for each pixel or position."""
DENSE = ("segments", "pictures", "tags", "spans")
DTYPES = {
    "vector": ("float32", "float64", "uint8", "int32", "int64"),
    "image": ("uint8", "float32"),
    "segments": ("float32", "uint8"),
    "pictures": ("float32", "uint8"),
    "tokens": ("int32", "int64"),
    "tags": ("int32", "int64"),
    "sequence": ("float32", "float64"),
    "spans": ("float32",),
    "named": ("float32", "uint8"),
}
LAYERS = (
    "batch_norm", "layer_norm", "l2", "constraint", "mean_loss", "sum_loss", "activity", "shared", "residual", "nested",
    "frozen", "counter", "running_mean", "spectral", "dropout", "tied", "subclass", "variable", "double", "pretrained",
    "blocks", "detached", "own_optimizer",
)  # fmt: skip
DRAWN_LATER = ("tied", "subclass", "variable", "double", "pretrained", "blocks", "detached", "own_optimizer")
"""Layers that do not suit every case, or were added later, which must not change the cases of earlier seeds."""
CANCELLED = ("hidden/bias", "batch_normalization/moving_mean", "hidden_bias_average")
"""Ends of the paths of what batch normalization subtracts again: the gradient is rounding alone, and so is the step of
an optimizer that divides it by its size. Evaluations are compared with the same values of these."""
OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "lion", "rmsprop", "nadam", "ftrl")
STRATEGIES = ("one", "mirrored", "central", "multiworker", "ps", "pipeline")


@dataclass(frozen=True)
class Case:
    """What was drawn. The defaults are the simplest case."""

    seed: int
    kind: str = "vector"
    dtype: str = "float32"
    values: bool = False
    """Whether labels are quantities instead of classes."""
    weights: bool = False
    masked: bool = False
    ragged: bool = False
    """Whether the last batch of an epoch begins the next one."""
    hidden: int = 0
    """Number of the first layer in `source.HIDDEN`."""
    layers: tuple[str, ...] = ()
    own_loss: bool = False
    metrics: bool = False
    optimizer: str = "sgd"
    rate: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: bool = False
    schedule: str = "constant"
    warmup: int = 0
    clip: float = 0.0
    ema: float = 0.0
    scaling: str = "none"
    freeze: bool = False
    callbacks: str = ""
    own_step: str = ""
    """The method of Keras's step that the model overrides: `train_step` or `compute_loss`."""
    precision: str = "fp32"
    strategy: str = "one"
    replicas: int = 1
    tasks: int = 1
    stages: int = 1
    pipe: str = "gpipe"
    remat: bool = False
    micro_batches: int = 1
    shards: int = 0
    loop: str = "custom"
    steps: int = 5
    steps_per_loop: int = 1
    checkpoint_every: int = 2
    evaluate_every: int = 0
    killed_at: tuple[int, ...] = ()

    @property
    def own_share(self) -> int:
        """How many times replicas divide sums in the model's own losses, which plain Keras does not."""
        return 1 if self.shards else self.replicas

    @property
    def parts(self) -> int:
        """Into how many parts a step is divided."""
        return (self.shards or self.replicas) * self.micro_batches

    @property
    def in_parts(self) -> bool:
        """Whether plain Keras must be given the parts one after the other."""
        # Keras squares, and clips, the gradient of each occurrence of a token, and ours the sum of a row's.
        rows = self.kind in ("tokens", "tags")
        together = self.kind == "named" and self.own_loss  # Keras takes no loss of several outputs
        return bool(self.micro_batches > 1 or self.shards or self.pipe == "pipedream" or rows or together)

    @property
    def masks_outputs(self) -> bool:
        """Whether a mask reaches the outputs: these layers make another tensor, without it."""
        ends = {"tied", "counter", "running_mean", "residual", "variable"} & set(self.layers)
        return self.masked and self.kind in DENSE and not ends


def draw(seed: int) -> Case:
    random_ = random.Random(seed)

    def maybe(share: float) -> bool:
        return random_.random() < share

    pick = random_.choice
    kind = pick(KINDS)
    case: dict[str, Any] = {"kind": kind, "dtype": pick(DTYPES[kind]), "steps": pick((4, 5, 7))}
    case["values"] = kind == "pictures" or (kind not in ("tags", "tokens", "named") and maybe(0.3))
    case["weights"], case["ragged"] = maybe(0.3), maybe(0.3)
    case["masked"] = kind in ("tokens", "tags", "sequence", "spans") and maybe(0.5)
    layers = [name for name in LAYERS if name not in DRAWN_LATER and maybe(0.18)]
    layers += ["tied"] if kind == "tags" and maybe(0.5) else []
    layers += ["subclass"] if kind == "vector" and maybe(0.2) else []
    case["layers"] = tuple(layers)
    masked = case["masked"] and kind in DENSE  # the mask reaches the output, and functions give values of examples
    case["own_loss"], case["metrics"] = maybe(0.25) and not masked, maybe(0.3) and not masked
    case |= _optimizer(random_, maybe)
    case |= _cluster(random_, maybe)
    case["precision"] = random_.choices(("fp32", "bf16", "fp16"), (8, 1, 1))[0]
    if case["precision"] != "fp32":  # Keras cannot add a loss in half precision to one in full
        case["layers"] = tuple(name for name in case["layers"] if name != "activity")
        case |= {"optimizer": "sgd", "rate": 0.1}  # others make whole steps of gradients that are rounding alone
    case["steps_per_loop"], case["checkpoint_every"] = pick((1, 2, 3)), pick((1, 2, 3))
    case["evaluate_every"] = 2 if maybe(0.2) else 0
    if maybe(0.2) and kind not in ("tokens", "tags"):
        case["callbacks"] = pick(("schedule", "plateau", "stopping", "epochs"))
        case |= {"steps": 6, "ragged": False, "schedule": "constant", "warmup": 0}
    if case.get("callbacks") in ("plateau", "stopping"):  # they watch `val_loss`, ours without the losses of `call`
        case["layers"] = tuple(name for name in case["layers"] if name not in ("mean_loss", "sum_loss", "activity"))
    if case["loop"] == "fit" and kind != "named" and maybe(0.15):
        case["own_step"] = "train_step"
    if maybe(0.4):
        case["killed_at"] = tuple(sorted(random_.sample(range(1, case["steps"]), pick((1, 1, 2)))))
    if "dropout" in case["layers"] and not case.get("killed_at"):  # there is nothing else to compare it with
        case["killed_at"] = (random_.randrange(1, case["steps"]),)
    if case.get("own_step") and not case.get("callbacks") and maybe(0.5):  # evaluations do not call it
        case["own_step"] = "compute_loss"
    if maybe(0.1) and not case["clip"]:  # Keras cannot clip the norm of gradients of several types
        case["layers"] += ("double",)
    if maybe(0.15) and "subclass" not in case["layers"]:
        case["layers"] += ("pretrained",)
    if maybe(0.15):
        case["layers"] += ("blocks",)
    if seed >= 1000 and maybe(0.5) and case.get("stages", 1) < 3:  # some have more places to cut
        case["hidden"] = random_.randrange(1, 64)
    return Case(seed, **case)


def _optimizer(random_: random.Random, maybe: Any) -> dict[str, Any]:
    name = random_.choice(OPTIMIZERS)
    chosen: dict[str, Any] = {"optimizer": name, "rate": 0.1 if name == "sgd" else 0.02}
    if name == "sgd" and maybe(0.6):
        chosen |= {"momentum": 0.9, "nesterov": maybe(0.5)}
    if not own_optimizer(name):
        chosen["ema"] = 0.8 if maybe(0.2) else 0.0
        if maybe(0.25):
            chosen |= {"weight_decay": 0.05, "no_decay": maybe(0.5)}
    chosen["schedule"] = random_.choice(("constant", "cosine", "linear"))
    chosen["warmup"] = random_.choice((0, 0, 2))
    chosen["clip"] = random_.choice((0.0, 0.0, 0.05))
    chosen["scaling"] = random_.choice(("none", "none", "none", "linear", "sqrt"))
    chosen["freeze"] = maybe(0.15)
    return chosen


def _cluster(random_: random.Random, maybe: Any) -> dict[str, Any]:
    pick = random_.choice
    strategy = random_.choices(STRATEGIES, (6, 6, 5, 1, 0.5, 5))[0]
    rare = {"pipeline": 0.05, "ps": 0.0}  # under parameter servers it is that of tf_keras
    loop = "fit" if maybe(rare.get(strategy, 0.35)) else "custom"
    chosen: dict[str, Any] = {"strategy": strategy, "loop": loop}
    if strategy in ("mirrored", "central"):
        chosen["replicas"] = pick((2, 3))
    elif strategy == "multiworker":
        chosen["replicas"] = chosen["tasks"] = pick((2, 2, 3))
    elif strategy == "ps":
        chosen["tasks"] = 3
    elif strategy == "pipeline":
        chosen |= {"stages": pick((1, 2, 2, 3)), "pipe": pick(("gpipe", "1f1b", "pipedream")), "remat": maybe(0.2)}
        if chosen["pipe"] == "pipedream":  # cut before the last layer, which the program for Keras must know
            chosen["stages"] = min(2, chosen["stages"])
        if chosen["stages"] > 1 and maybe(0.2):
            chosen["tasks"] = chosen["stages"]
    chosen["micro_batches"] = pick((1, 2, 4)) if strategy == "pipeline" or maybe(0.25) else 1
    if maybe(0.02 if strategy in ("ps", "pipeline") or chosen["loop"] == "fit" else 0.3):
        chosen["shards"] = pick((3, 3, 4, 2))
    return chosen


def twin(case: Case) -> Case | None:
    """Return a case that must end with the same bits; None where none is promised."""
    if case.strategy == "ps":
        return None
    if case.shards and case.seed % 2:
        other = {"strategy": "one", "replicas": 1} if case.replicas > 1 else {"strategy": "mirrored", "replicas": 2}
        return dataclasses.replace(case, **other, tasks=1)
    # Where stages are cut, gradients of these may be summed in another order.
    sums = {"mean_loss", "sum_loss", "activity", "shared", "tied"} & set(case.layers)
    if case.strategy == "pipeline" and case.pipe != "pipedream" and case.stages > 1 and case.seed % 2 and not sums:
        return dataclasses.replace(case, stages=1, tasks=1, pipe="gpipe")
    if case.strategy == "pipeline" and case.tasks > 1 and sums == {"tied"}:  # two processes add up gradients
        return dataclasses.replace(case, tasks=1)
    return case if case.killed_at else None


def own_optimizer(name: str) -> bool:
    """Whether the user's own function makes this optimizer."""
    return name in ("rmsprop", "nadam", "ftrl")


def up(case: Case, module: str) -> dict[str, Any]:
    """Return the options of `up` for a case, with the overrides that follow `--`."""
    options: dict[str, Any] = {"strategy": case.strategy, "workers": 0, "loop": case.loop}
    if case.strategy in ("mirrored", "central"):
        options["devices"] = case.replicas
    elif case.strategy == "multiworker":
        options["workers"] = case.tasks - 1
    elif case.strategy == "ps":
        options |= {"workers": 1, "ps": 1}
    elif case.strategy == "pipeline":
        options |= {"workers": case.tasks - 1, "stages": case.stages, "schedule": case.pipe, "remat": case.remat}
        options |= {"cut": "logits"} if case.pipe == "pipedream" and case.stages == 2 else {}
    options |= {"micro_batches": case.micro_batches, "precision": case.precision}
    options |= {"bitwise_elastic": case.shards} if case.shards else {}
    options["checkpoint_every"] = str(case.checkpoint_every)
    training = {
        "dataset": f"{module}:data", "model": f"{module}:model", "global-batch": BATCH, "epochs": 100, "threads": 1,
        "seed": case.seed % 1000, "max-steps": case.steps, "log-every": 1, "steps-per-loop": case.steps_per_loop,
        "loss": loss_of(case, module), "evaluate-every": case.evaluate_every,
        "optimizer.name": f"{module}:optimizer" if own_optimizer(case.optimizer) else case.optimizer,
        "optimizer.learning-rate": case.rate, "optimizer.warmup-steps": case.warmup,
        "optimizer.schedule": case.schedule, "optimizer.clip-norm": case.clip, "optimizer.ema": case.ema,
        "optimizer.momentum": case.momentum, "optimizer.scaling": case.scaling, "optimizer.base-batch": 16,
    }  # fmt: skip
    training |= {"metrics": f"{module}:metrics"} if case.metrics else {}
    training |= {"callbacks": f"{module}:callbacks"} if case.callbacks else {}
    training |= {"freeze": "hidden"} if case.freeze else {}
    training |= {"optimizer.weight-decay": case.weight_decay} if case.weight_decay else {}
    training |= {"optimizer.no-decay": "bias"} if case.no_decay else {}
    training |= {"loss-weights": "price=0.5"} if case.kind == "named" and not case.own_loss else {}
    words = [f"--{name}={value}" for name, value in training.items()]
    return {**options, "overrides": [*words, *(["--optimizer.nesterov"] if case.nesterov else [])]}


def loss_of(case: Case, module: str) -> str:
    if case.own_loss:
        return f"{module}:loss"
    if case.kind == "named":
        return "kind=sparse_categorical_crossentropy,price=mean_squared_error"
    return "mean_squared_error" if case.values else "sparse_categorical_crossentropy"
