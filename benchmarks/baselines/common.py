"""Shared parts of the baselines: command line, data, and the log of their steps.

A line of JSON on stdout is `{"step": 25, "time": ...}`: the first step, then every `EVERY` steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

EVERY = 25
SAVED_EVERY = 2 * EVERY
"""Steps between two saved states, with `--state`."""


def parser() -> argparse.ArgumentParser:
    """Return a parser of the options that all baselines share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arrays", type=Path, required=True, help="folder of the prepared arrays")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps to do (default: 100)")
    parser.add_argument("--global-batch", type=int, default=192, help="examples of a step (default: 192)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam (default: 0.002)")
    parser.add_argument("--threads", type=int, default=0, help="of one operation; 0: all cores (default: 0)")
    parser.add_argument("--state", type=Path, help="folder in which the state is saved, and from which it is restored")
    return parser


def train_arrays(folder: Path) -> tuple[Any, Any]:
    """Return the training images `[N, 28, 28, 1] uint8` and their classes `[N] int64`."""
    import numpy as np

    parts = json.loads((folder / "arrays.json").read_text())["splits"]["train"]
    found = []
    for part in (parts.get("features") or parts["images"], parts["labels"]):
        array = np.fromfile(folder / part["file"], part["dtype"])
        found.append(array[: math.prod(part["shape"])].reshape(part["shape"]))
    return found[0], found[1]


def log_step(step: int, steps: int) -> None:
    """Log a finished step if it is the first, the last or a multiple of `EVERY`."""
    if step == 1 or step % EVERY == 0 or step == steps:
        print(json.dumps({"step": step, "time": time.time()}), flush=True)
