"""Inspections of trained weights: the classes that an export confuses, and the distance of two runs' weights.

python -m train.inspection classify --run-dir runs/RUN [--data-dir data]
python -m train.inspection distance --run-dir runs/ONE --run-dir runs/OTHER

Prints JSON. `cluster/host/reports/weights.py` runs it and checks the output.

Shapes: N examples, K classes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cluster.contract.run.folder import RunFolder
from cluster.system import quiet
from cluster.system.errors import ClusterError, PrerequisiteError
from cluster.system.json_files import read_json
from cluster.system.messages import plain
from train.config import TrainConfig

BATCH = 500
SHOWN_EXAMPLES = 24
NOT_WEIGHTS = re.compile(r"optimizer/_(variables|iterations|learning_rate)|OPTIMIZER_SLOT|save_counter|^step/|^_")
EXPORTED = re.compile(r"^variables/")


def main(arguments: list[str]) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.inspection", description="What trained weights do.")
    parser.add_argument("command", choices=("classify", "distance"))
    parser.add_argument("--run-dir", type=Path, action="append", required=True, help="run folder; distance takes two")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="prepared data (%(default)s)")
    options = parser.parse_args(arguments)
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
    runs = [RunFolder(path) for path in options.run_dir]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the model may print
            value = classify(runs[0], options.data_dir) if options.command == "classify" else distance(*runs[:2])
    except ClusterError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(value))
    return 0


def classify(run: RunFolder, data_dir: Path) -> dict[str, Any]:
    """Classify the test split by a run's export; return a row of counts for each true class, and the worst mistakes.

    Raises:
        PrerequisiteError: there is no export, or its data is not a classification in memory.
    """
    if not (run.export / "saved_model.pb").exists():
        raise PrerequisiteError(f"run {run.name} has no export")
    with quiet.imports():
        import tensorflow as tf

        from train.data import memory, sources
        from train.model import export as exporting

    source = sources.find(TrainConfig.from_json(read_json(run.config)), data_dir, run)
    plain = not isinstance(source.feature_shape, Mapping) and not isinstance(source.classifies, Mapping)
    if source.arrays is None or not plain or not source.classifies or source.label_shape != ():
        raise PrerequisiteError(f"run {run.name} does not classify examples that are in memory")
    examples = memory.load(source.arrays.test)
    features_N, labels_N = examples.features.numpy(), examples.labels.numpy()
    serve = tf.saved_model.load(str(run.export)).signatures["serving_default"]
    ((name, spec),) = serve.structured_input_signature[1].items()
    shares_NK = np.concatenate(
        [
            tf.nn.softmax(next(iter(serve(**{name: tf.cast(part, spec.dtype)}).values()))).numpy()
            for part in (features_N[at : at + BATCH] for at in range(0, len(features_N), BATCH))
        ]
    )
    predicted_N = shares_NK.argmax(axis=1)
    counts_KK = np.zeros((source.num_outputs, source.num_outputs), int)
    np.add.at(counts_KK, (labels_N, predicted_N), 1)
    wrong = np.flatnonzero(predicted_N != labels_N)
    worst = wrong[np.argsort(-shares_NK[wrong, predicted_N[wrong]], kind="stable")][:SHOWN_EXAMPLES]
    classes = read_json(run.export / exporting.CLASSES, []) or [str(k) for k in range(source.num_outputs)]
    return {
        "classes": classes,
        "confusion": counts_KK.tolist(),
        "wrong": [
            {
                "truth": classes[labels_N[at]],
                "said": classes[predicted_N[at]],
                "share": round(float(shares_NK[at, predicted_N[at]]), 4),
                "png": _png(features_N[at]),
            }
            for at in worst
        ],
    }


def _png(pixels_HWC: np.ndarray) -> str | None:
    """Return an image as a PNG in base64; None if the example is not an image."""
    from PIL import Image

    if pixels_HWC.dtype != np.uint8 or pixels_HWC.ndim != 3 or pixels_HWC.shape[-1] not in (1, 3):
        return None
    file = io.BytesIO()
    Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[-1] == 1 else pixels_HWC).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def distance(one: RunFolder, other: RunFolder) -> dict[str, Any]:
    """Return the distance of the final weights of two runs, from their exports or their newest checkpoints.

    Raises:
        PrerequisiteError: the runs do not both have an export or a checkpoint.
    """
    with quiet.imports():
        import tensorflow as tf

        from train.saving import files

    def checkpoint(run: RunFolder) -> str:
        newest = files.newest_good(run.checkpoints, lambda _: None)
        return newest.prefix if newest else ""

    def exported(run: RunFolder) -> str:
        prefix = run.export / "variables" / "variables"
        return str(prefix) if prefix.with_suffix(".index").exists() else ""

    for kind, find in (("export", exported), ("checkpoint", checkpoint)):
        if all(prefixes := [find(run) for run in (one, other)]):
            return {"of": kind} | _apart(*(_weights(tf.train.load_checkpoint(prefix)) for prefix in prefixes))
    raise PrerequisiteError(f"runs {one.name} and {other.name} do not both have an export or a good checkpoint")


def _weights(reader: Any) -> dict[str, np.ndarray]:
    """Return the model's weights of a checkpoint or an export by name, without the optimizer's state."""
    names = [name for name in reader.get_variable_to_shape_map() if not NOT_WEIGHTS.search(name)]
    chosen = [name for name in names if EXPORTED.match(name)] or names
    values = {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): np.asarray(reader.get_tensor(name)) for name in chosen}
    return {name: value for name, value in values.items() if np.issubdtype(value.dtype, np.floating)}


def _apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, Any]:
    shapes, other_shapes = ({name: value.shape for name, value in weights.items()} for weights in (one, other))
    if shapes != other_shapes or not shapes:
        return {"comparable": False}
    differences = {name: one[name].astype(np.float64) - other[name] for name in one}
    norm = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in one.values()))
    apart = np.sqrt(sum(float((value**2).sum()) for value in differences.values()))
    worst = max(differences, key=lambda name: float(np.abs(differences[name]).max(initial=0)))
    return {
        "comparable": True,
        "identical": all(np.array_equal(one[name], other[name]) for name in one),
        "weights": sum(value.size for value in one.values()),
        "largest": float(np.abs(differences[worst]).max(initial=0)),
        "where": f"{worst} {list(shapes[worst])}",
        "relative": float(apart / norm) if norm else None,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
