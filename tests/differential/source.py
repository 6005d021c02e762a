"""Writes a case as a Python file: a user's module, and below it what plain Keras makes of the same model."""

import re
from pathlib import Path
from typing import Any

from tests.differential.draw import BATCH, SCALE, TEST, TRAIN, Case, own_optimizer

TEMPLATE = Path(__file__).with_name("template.txt")
"""`{{expression}}` stands for its value; where the expression after `#?` is false, its line and block are left out."""
CLASSES, POSITIONS = 3, 5
LENGTHS = f"np.arange({POSITIONS}) < random.integers(1, {POSITIONS + 1}, (COUNT, 1))"
_DENSE = 'layers.Dense(8, "tanh", name="hidden")(x)'
_CONVOLUTION = 'layers.Conv2D(8, 3, padding="same", activation="tanh", name="hidden")(x)'
_LSTM = 'layers.LSTM(8, return_sequences=True, name="hidden")(x)'
HIDDEN = {
    "image": (
        _CONVOLUTION,
        'layers.SeparableConv2D(8, 3, padding="same", activation="tanh", name="hidden")(x)',
        'layers.DepthwiseConv2D(3, padding="same", depth_multiplier=4, name="hidden")(x)',
        'layers.Conv2DTranspose(8, 3, padding="same", activation="gelu", name="hidden")(x)',
        'layers.Conv2D(8, 3, padding="same", dilation_rate=2, activation="swish", name="hidden")(x)',
        f"layers.UpSampling2D()(layers.AveragePooling2D(2)({_CONVOLUTION}))",
        'layers.ZeroPadding2D(1)(layers.Conv2D(8, 3, activation="tanh", name="hidden")(x))',
    ),
    "positions": (
        _LSTM,
        _DENSE,
        'layers.GRU(8, return_sequences=True, name="hidden")(x)',
        'layers.Bidirectional(layers.LSTM(4, return_sequences=True), name="hidden")(x)',
        'layers.RNN([layers.LSTMCell(8), layers.GRUCell(8)], return_sequences=True, name="hidden")(x)',
        'layers.TimeDistributed(layers.Dense(8, "tanh"), name="hidden")(x)',
        'layers.EinsumDense("btd,de->bte", (5, 8), bias_axes="e", activation="tanh", name="hidden")(x)',
        f"(lambda x: layers.MultiHeadAttention(2, 4, use_bias=False)(x, x))({_DENSE})",
        f"(lambda x: layers.Attention(use_scale=True)([x, x]))({_DENSE})",
    ),
    "vector": (
        _DENSE,
        'layers.Dense(8, "tanh", lora_rank=2, name="hidden")(x)',
        'layers.PReLU()(layers.Dense(8, name="hidden")(x))',
        f'(lambda x: layers.Multiply()([x, layers.Dense(8, "sigmoid")(x)]))({_DENSE})',
        'layers.LSTM(8, name="hidden")(layers.Reshape((4, 2))(layers.Dense(8, "tanh")(x)))',
    ),
}
"""The first layer of a model, by the form of its data; the first of each is the usual one."""
CALLBACKS = {
    "schedule": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "plateau": 'keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, min_delta=1.0)',
    "stopping": 'keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=1.0, restore_best_weights=True)',
    "epochs": "Shrink()",
}
OPTIMIZERS = {
    "sgd": "SGD(rate, momentum={case.momentum}, nesterov={case.nesterov})",
    "adam": "Adam(rate)",
    "adamw": "AdamW(rate)",
    "lamb": "Lamb(rate)",
    "lion": "Lion(rate)",
    "rmsprop": "RMSprop(rate, momentum=0.5)",
    "nadam": "Nadam(rate, use_ema=True)",
    "ftrl": "Ftrl(rate)",
}


def write(case: Case) -> str:
    names, lines, left_out = _names(case), [], None
    for line in TEMPLATE.read_text().splitlines():
        indent = len(line) - len(line.lstrip()) if line else 99
        if left_out is not None and indent > left_out:
            continue
        text, _, condition = line.partition(" #? ")
        left_out = indent if condition and not eval(condition, names) else None
        if left_out is None:
            lines.append(re.sub(r"\{\{(.+?)\}\}(?!\})", lambda found: str(eval(found[1], names)), text))
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines) + "\n")


def _names(case: Case) -> dict[str, Any]:
    """Return the names that the expressions of the template use."""
    train, named, tokens = TRAIN + (4 if case.ragged else 0), case.kind == "named", case.kind in ("tokens", "tags")
    usual = {"price": '"mean_squared_error"', "kind": "keras.losses.SparseCategoricalCrossentropy(from_logits=True)"}
    loss, metrics = usual["price" if case.values else "kind"], "mean_absolute_error" if case.values else "accuracy"
    if named:  # Keras takes no loss of several outputs
        heads = ", ".join(f'"{name}": {usual[name]}' for name in ("kind", "price"))
        loss = "None" if case.own_loss else f'{{{heads}}}, loss_weights={{"kind": 1.0, "price": 0.5}}'
    elif case.own_loss:
        loss = "loss"
    counts = f'{{"kind": {CLASSES}, "price": 1}}' if named else "2" if case.values else str(CLASSES)
    several, micro = case.shards or case.replicas, case.micro_batches  # what a replica or a shard has is cut
    cut = f"order(step).reshape({several}, {micro}, -1)"
    pipedream = case.pipe == "pipedream"
    num_parts = 1 if pipedream else micro * (case.shards or 1)
    counted = "np.sum(x[{}] != 0)" if tokens else "np.sum(np.any(x[{}] != 0, -1))"  # positions that are not masked
    weighed = f"{counted.format('part')} / {counted.format('order(step)')}"
    return {
        "BATCH": BATCH,
        "TEST": TEST,
        "SCALE": SCALE,
        "CALLBACKS": CALLBACKS,
        "own_optimizer": own_optimizer,
        "case": case,
        "has": case.layers.__contains__,
        "train": train,
        "named": named,
        "tokens": tokens,
        "values": case.values or named,
        "image": case.kind in ("image", "segments", "pictures"),
        "hidden": _hidden(case),
        "model": "Trained" if case.own_step else "keras.Model",
        "counts": counts,
        "loss": loss,
        "metrics": f'{{"kind": ["{metrics}"]}}' if named else f'["{metrics}"]',
        "score": f"kind_{metrics}" if named else metrics,
        "policy": {"fp32": "", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}[case.precision],
        "parts": f"{cut}.reshape({several * micro}, -1)"
        if case.shards
        else f"{cut}.swapaxes(0, 1).reshape({micro}, -1)",
        "num_parts": num_parts,
        "share": weighed if case.masks_outputs else f"1 / {num_parts}",
        "pipedream": pipedream,
        "parted": case.in_parts,
        "fits": bool(case.callbacks) and not case.in_parts,
        "whole": not case.callbacks and not case.in_parts,
        **_data(case),
        **_optimizer(case),
    }


def _hidden(case: Case) -> str:
    if case.kind in ("image", "segments", "pictures"):
        return HIDDEN["image"][case.hidden % len(HIDDEN["image"])]
    if case.kind in ("vector", "named"):
        return HIDDEN["vector"][case.hidden % len(HIDDEN["vector"])]
    usual = _LSTM if case.kind == "sequence" else _DENSE
    others = [layer for layer in HIDDEN["positions"] if layer != usual]
    return [usual, *others][case.hidden % len(HIDDEN["positions"])]


def _data(case: Case) -> dict[str, Any]:
    sizes = {"vector": "6", "named": "6", "sequence": f"{POSITIONS}, 3", "spans": f"{POSITIONS}, 3"}
    size = sizes.get(case.kind, str(POSITIONS) if case.kind in ("tokens", "tags") else "4, 4, 2")
    features = f"random.normal(size=(COUNT, {size}))"
    if "int" in case.dtype:
        bounds = "1, 11" if case.kind in ("tokens", "tags") else "0, 200"
        features = f"random.integers({bounds}, (COUNT, {size}))"
    if case.masked:
        features += f" * ({LENGTHS})" + ("" if case.kind in ("tokens", "tags") else "[..., None]")
    places = {"segments": ", 4, 4", "pictures": ", 4, 4", "tags": f", {POSITIONS}", "spans": f", {POSITIONS}"}
    at = f"(COUNT{places.get(case.kind, '')}"
    split = 'x[part, :4], "b": x[part, 4:]}, {"kind": y[part], "price": price[part]}'
    return {
        "features": features,
        "labels": f"random.normal(size={at}, 2))" if case.values else f"random.integers(0, {CLASSES}, {at},))",
        "split": (f'{{"a": {split}' if case.kind == "named" else "x[part], y[part]") + ", w[part]" * case.weights,
    }


def _optimizer(case: Case) -> dict[str, Any]:
    """Return the optimizer and the learning rate, by Keras's own schedules, with a warm-up of plain arithmetic."""
    peak = case.rate * {"none": 1.0, "linear": BATCH / 16, "sqrt": (BATCH / 16) ** 0.5}[case.scaling]
    warmup = 0 if case.callbacks and case.schedule == "constant" else case.warmup
    steps, of = max(1, case.steps - warmup), "keras.optimizers.schedules"
    after = {
        "constant": f"lambda step: {peak!r}",
        "cosine": f"{of}.CosineDecay({peak!r}, {steps})",
        "linear": f"{of}.PolynomialDecay({peak!r}, {steps}, 0.0)",
    }[case.schedule]
    options = f", weight_decay={case.weight_decay}" if case.weight_decay else ""
    options += f", use_ema=True, ema_momentum={case.ema}" if case.ema else ""
    made = OPTIMIZERS[case.optimizer].format(case=case)
    grown = f"{peak!r} * (1 + {warmup - 1} * step / {warmup}) / {warmup} if step < {warmup} else " if warmup else ""
    return {
        "peak": repr(peak),
        "warmup": warmup,
        "scheduled": case.schedule != "constant" or bool(warmup),
        "after": after,
        "grown": grown,
        "made": f"{made[:-1]}{options})",
    }
