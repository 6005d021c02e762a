"""A training loop of one's own: any script that reads TF_CONFIG runs as it is, here one that fits a line.

It also runs by itself, `python loop.py`: without TF_CONFIG the strategy has one worker.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
GLOBAL_BATCH = 64

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # first: it forms the cluster
random = np.random.default_rng(0)
points = random.uniform(-1, 1, (1024, 1)).astype("float32")
values = 3 * points + 2 + random.normal(0, 0.05, points.shape).astype("float32")

dataset = tf.data.Dataset.from_tensor_slices((points, values)).shuffle(1024, seed=1).repeat().batch(GLOBAL_BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
batches = iter(strategy.experimental_distribute_dataset(dataset.with_options(options)))

with strategy.scope():
    slope, offset = tf.Variable(0.0), tf.Variable(0.0)


@tf.function
def step(batch):
    """Take one step of gradient descent on a global batch; return its loss."""

    def replica(points, values):
        with tf.GradientTape() as tape:
            errors = slope * points + offset - values
            loss = tf.nn.compute_average_loss(errors**2, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, [slope, offset])
        context = tf.distribute.get_replica_context()
        for variable, gradient in zip([slope, offset], context.all_reduce("sum", gradients), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    return strategy.reduce("sum", strategy.run(replica, batch), axis=None)


for number in range(1, STEPS + 1):
    loss = float(step(next(batches)))
    if number % 20 == 0:
        print(f"step {number}  loss {loss:.4f}", flush=True)
print(f"y = {slope.numpy():.2f} x + {offset.numpy():.2f}", flush=True)

task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
if task["index"] == 0:  # one task writes; the others have the same values
    Path("line.json").write_text(json.dumps({"slope": float(slope.numpy()), "offset": float(offset.numpy())}))
