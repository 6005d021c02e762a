"""Reproduces keras issue 20585: `Model.fit` of Keras 3 under MultiWorkerMirroredStrategy on two tasks.

    python keras-20585.py          needs keras, tensorflow and nothing else; starts both tasks itself

Ends with 0 once both tasks have trained to the same weights, also with `steps_per_execution=2`; otherwise with 1 and
the error.
"""

import json
import os
import socket
import subprocess
import sys


def train():
    """Train as the task that TF_CONFIG names; print the sum of the weights."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    features, labels = np.ones((20, 2), "float32"), np.ones((20, 1), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)
    for steps_per_execution in (1, 2):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"], jit_compile=False, steps_per_execution=steps_per_execution)
        history = model.fit(dataset, epochs=1, validation_data=dataset, verbose=0).history
        print(sorted(history), float(np.sum(model.get_weights()[0])), flush=True)


def main():
    """Start two tasks; return 0 if both train to the same weights."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    tasks = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, __file__, "task"]
        tasks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    printed = [task.communicate()[0] for task in tasks]
    trained = [[line for line in text.splitlines() if line.startswith("[")] for text in printed]
    if all(task.returncode == 0 for task in tasks) and trained[0] == trained[1] and len(trained[0]) == 2:
        print(*trained[0], sep="\n")
        return 0
    print(printed[0][-3000:])
    return 1


if __name__ == "__main__":
    if sys.argv[1:] == ["task"]:
        try:
            train()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)  # TensorFlow waits here for the other task
        os._exit(0)
    sys.exit(main())
