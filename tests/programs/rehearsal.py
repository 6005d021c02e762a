"""A training in a cluster, after a rehearsal or without one."""

import json
import os
import sys
from pathlib import Path

import tensorflow as tf

from cluster.system.ports import free_ports
from tests.support.small_training import PLAIN, prepare, strategy_called, training
from train import patches
from train.startup import rehearsal


def main(result: Path, rehearses: bool) -> None:
    if rehearses:
        rehearsal.rehearse_step()
    (port,) = free_ports(1)
    cluster = {"cluster": {"chief": [f"127.0.0.1:{port}"]}, "task": {"type": "chief", "index": 0}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    strategy = strategy_called("multiworker")
    tf.config.experimental.enable_op_determinism()
    patches.apply()
    trained = training("multiworker", prepare(result.parent), PLAIN)
    found = trained.trained() | {
        "names": [weight.path for weight in trained.train_step.model.trainable_variables],
        "tasks": len(strategy.cluster_resolver.cluster_spec().as_dict()["chief"]),
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "rehearsed")
    os._exit(0)
