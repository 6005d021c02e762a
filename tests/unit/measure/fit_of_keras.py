"""What Keras's own `fit` does under MultiWorkerMirroredStrategy, as a task of the cluster that TF_CONFIG names."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


def main(result: Path) -> None:
    """Fit a small model."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    examples = tf.data.Dataset.from_tensor_slices((np.ones((8, 2), np.float32), np.ones((8, 1), np.float32))).batch(4)
    told = ""
    try:
        model.fit(examples, epochs=1, verbose=0)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    result.write_text(json.dumps({"tasks": strategy.extended._num_workers, "error": told}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # TensorFlow waits here for the other task
