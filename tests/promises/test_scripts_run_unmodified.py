"""Scripts that know nothing of this project run unmodified, as with a TF_CONFIG set by hand."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.system.json_files import read_json
from tests import fast
from tests.e2e.scenario import Clusters, summary
from tests.support.waiting import wait_for

FIT = """
import os
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
points = np.random.default_rng(0).normal(size=(480, 8)).astype("float32")
labels = (points.sum(axis=1) > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((points, labels)).repeat().batch(48)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(2)])
    model.build((None, 8))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
# The tasks of a cluster share this folder.
backup = tf.keras.callbacks.BackupAndRestore(os.path.join(os.environ.get("RUN_DIR", "."), "backup"))
model.fit(
    dataset.with_options(options), epochs=int(sys.argv[1]), steps_per_epoch=10, verbose=2, callbacks=[backup]
)
"""


COORDINATE = """
import json

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    ).join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = tf.Variable(0.0)
    steps = tf.Variable(0, dtype=tf.int64)


@tf.function
def step():
    weight.assign_sub(0.1 * 2.0 * (weight - 3.0))
    steps.assign_add(1)


for _ in range(40):
    coordinator.schedule(step)
coordinator.join()
with open("result.json", "w") as file:
    json.dump({"weight": float(weight.numpy()), "steps": int(steps.numpy())}, file)
"""

ROUTES = """
import os

with open("/proc/net/route") as table:
    routes = [line.split() for line in table][1:]
with open("/script/neighbour.txt") as theirs, open("neighbour.txt") as linked:
    assert theirs.read() == linked.read()
try:
    open("/script/written", "w")
except OSError:
    pass
else:
    raise SystemExit("the script's folder can be written")
print("ways out:", sum(route[1] == "00000000" for route in routes), os.getcwd())
"""


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A user's folder with scripts."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for name, text in (("fit.py", FIT), ("coordinate.py", COORDINATE), ("routes.py", ROUTES)):
        (folder / name).write_text(text)
    (folder / "neighbour.txt").write_text("next to the script\n")
    return folder


@pytest.fixture(scope="module")
def clusters(tmp_path_factory) -> Iterator[Clusters]:
    """Commands on a fresh folder of runs, without prepared data: a script has its own."""
    fast.leave_out("starts a cluster")
    folder = tmp_path_factory.mktemp("scripts")
    cluster = Clusters(folder / "runs", {"DATA_DIR": str(folder / "data")})
    yield cluster
    cluster.down()


def run_script(clusters: Clusters, name: str, script: Path, *words: str, runtime: str = "local") -> RunFolder:
    """Run a script on a cluster, to its end unless detached; return the run's folder."""
    return clusters.up(name, f"--script={script}", *words, runtime=runtime, training=(), timeout_s=400)


def test_killing_a_script_must_restart_the_gang(clusters, theirs):
    run = run_script(clusters, "killed", theirs / "fit.py", "--detach", "--workers=1", "--separate-chief", "--", "12")
    wait_for(lambda: "Epoch 3/" in run.log("worker-0").read_text(), "epoch 3")
    os.kill(read_json(run.programs("worker-0"))["program"]["pid"], signal.SIGKILL)
    clusters.invoke("wait", "--timeout=240")
    ended = summary(run)
    (restart,) = ended["restarts"]
    assert ("succeeded", "worker-0", 1) == (ended["state"], restart["task"], restart["generation"])
    assert 1 == run.log("chief").read_text().count("Epoch 1/12")  # it resumed from its backup


def test_servers_must_end_with_the_coordinator(clusters, theirs):
    run = run_script(clusters, "coordinate", theirs / "coordinate.py", "--workers=1", "--ps=1")
    ended = summary(run)
    assert ("succeeded", "ParameterServerStrategy") == (ended["state"], ended["strategy"])
    assert {"chief": 0, "worker-0": 0, "ps-0": 0} == ended["tasks"]
    result = json.loads((run.work("chief") / "result.json").read_text())
    assert 40 == result["steps"]
    assert abs(result["weight"] - 3.0) < 0.1


@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_a_script_in_a_container_must_have_a_way_out_and_leave_its_folder_alone(clusters, theirs):
    run = run_script(clusters, "routes", theirs / "routes.py", "--workers=1", runtime="docker")
    assert "succeeded" == summary(run)["state"]
    for task in ("chief", "worker-0"):
        assert f"ways out: 1 /runs/routes/work/{task}\n" == run.log(task).read_text()
    _, networks = engine.ask("network", "ls", "--format", "{{.Name}}")
    assert not [name for name in networks.split() if name.endswith(("_egress", "_cluster")) and "routes" in name]
