"""Scripts that know nothing of this project run unmodified, as with a TF_CONFIG set by hand."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.runtime import supervisor
from tests.e2e.scenario import Clusters, summary
from tests.promises.test_containers_are_locked_down import containers
from tests.support.waiting import wait_for

FIT = """
import json
import os
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
cluster = json.loads(os.environ["TF_CONFIG"])
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
history = model.fit(
    dataset.with_options(options), epochs=int(sys.argv[1]), steps_per_epoch=10, verbose=2, callbacks=[backup]
)
if cluster["task"] == {"type": "worker", "index": 0}:
    with open("history.json", "w") as file:
        json.dump({"workers": len(cluster["cluster"]["worker"]), "loss": history.history["loss"]}, file)
"""

EVERYTHING = """
import hashlib
import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
shared, task = os.environ["RUN_DIR"], json.loads(os.environ["TF_CONFIG"])["task"]
points = np.random.default_rng(0).normal(size=(500, 8)).astype("float32")  # no whole number of batches
labels = (points.sum(axis=1) > 0).astype("int64")
weights = np.linspace(0.5, 1.5, 500).astype("float32")
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
columns = (points, labels, weights) if sys.argv[2] == "sample" else (points, labels)  # Keras takes one kind of weights
whole = tf.data.Dataset.from_tensor_slices(columns).with_options(options)


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.params["verbose"] == 2 and self.epoch == 4 and batch >= 3 and task["index"] == int(sys.argv[1]):
            if not os.path.exists(f"{shared}/killed"):
                open(f"{shared}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


with strategy.scope():
    layers = [keras.Input((8,)), keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"], weighted_metrics=["accuracy"], steps_per_execution=2, jit_compile=False,
    )
history = model.fit(
    whole.take(400).batch(48), validation_data=whole.skip(400).batch(48), epochs=8, verbose=2,
    class_weight={0: 0.7, 1: 1.3} if sys.argv[2] == "class" else None,
    callbacks=[
        Kill(),
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(f"{shared}/best.keras", monitor="val_loss", save_best_only=True),
        keras.callbacks.BackupAndRestore(f"{shared}/backup"),
    ],
).history
bits = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
with open(f"{shared}/result-{task['index']}.json", "w") as file:
    json.dump({"bits": hashlib.sha256(bits).hexdigest(), "last": {name: each[-1] for name, each in history.items()},
               "epochs": len(history["loss"])}, file)
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
    """A folder with scripts, as somebody has it."""
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
    folder = tmp_path_factory.mktemp("scripts")
    cluster = Clusters(folder / "runs", {"DATA_DIR": str(folder / "data")})
    yield cluster
    cluster.invoke("down")
    for path in cluster.runs_dir.glob("*/cluster.json"):
        assert [] == supervisor.processes_left(RunFolder(path.parent))


def run_script(clusters: Clusters, name: str, script: Path, *words: str, runtime: str = "local") -> RunFolder:
    """Run a script to its end on a cluster; return the run's folder."""
    options, arguments = (words[: words.index("--")], words[words.index("--") :]) if "--" in words else (words, ())
    started = ("up", f"--name={name}", f"--runtime={runtime}", "--tensorboard-port=0", f"--script={script}")
    clusters.invoke(*started, *options, *arguments, timeout_s=400)
    return clusters.run(name)


def check_fit(run: RunFolder, workers: int) -> None:
    ended = summary(run)
    assert ("succeeded", [], {}) == (ended["state"], ended["restarts"], ended["metrics"])
    assert {"chief": 0} | {f"worker-{index}": 0 for index in range(workers)} == ended["tasks"]
    history = json.loads((run.work("chief") / "history.json").read_text())
    assert workers + 1 == history["workers"]
    assert history["loss"][-1] < history["loss"][0]


def test_killing_a_script_must_restart_the_gang(clusters, theirs):
    script = theirs / "fit.py"
    up = ("up", "--name=killed", "--runtime=local", "--tensorboard-port=0", f"--script={script}", "--detach")
    clusters.invoke(*up, "--workers=1", "--separate-chief", "--", "12")
    run = clusters.run("killed")
    wait_for(lambda: "Epoch 3/" in run.log("worker-0").read_text(), "epoch 3")
    os.kill(script_of(run, "worker-0"), signal.SIGKILL)
    clusters.invoke("wait", "--timeout=240")
    ended = summary(run)
    (restart,) = ended["restarts"]
    assert ("succeeded", "worker-0", 1) == (ended["state"], restart["task"], restart["generation"])
    assert 1 == run.log("chief").read_text().count("Epoch 1/12")  # it went on from its own backup


@pytest.mark.long
@pytest.mark.parametrize(("workers", "weights"), [(1, "sample"), (2, "class")])
def test_a_script_with_all_that_fit_takes_must_end_with_the_same_bits_after_a_kill(
    clusters, tmp_path, workers, weights
):
    script = tmp_path / "everything.py"
    script.write_text(EVERYTHING)
    results = []
    for name, killed in (("whole", -1), ("killed", workers)):
        run = run_script(clusters, f"{name}-{workers}", script, f"--workers={workers}", "--", str(killed), weights)
        assert [f"worker-{workers - 1}"] * (killed > 0) == [each["task"] for each in summary(run)["restarts"]]
        results.append([json.loads((run.path / f"result-{at}.json").read_text()) for at in range(workers + 1)])
        assert (run.path / "best.keras").exists()
    whole, again = results
    assert 8 == whole[0]["epochs"] > again[0]["epochs"]  # it went on from the backup
    assert 1 == len({each["bits"] for each in (*whole, *again)})
    assert whole[0]["last"] == again[0]["last"]


def script_of(run: RunFolder, task: str) -> int:
    """Return the process id of a task's script."""
    for pid in supervisor.processes_left(run):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if f"TASK={task}".encode() in environment and b"cluster.agent" not in command:
            return pid
    raise AssertionError(f"{task} has no script")


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
def test_keras_fit_must_train_in_containers(clusters, theirs):
    run = run_script(clusters, "fit-docker", theirs / "fit.py", "--workers=1", "--", "2", runtime="docker")
    check_fit(run, 1)
    assert {} == containers(run)


@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_a_script_in_a_container_must_have_a_way_out_and_leave_its_folder_alone(clusters, theirs):
    run = run_script(clusters, "routes", theirs / "routes.py", "--workers=1", runtime="docker")
    assert "succeeded" == summary(run)["state"]
    for task in ("chief", "worker-0"):
        assert f"ways out: 1 /runs/routes/work/{task}\n" == run.log(task).read_text()
    _, networks = engine.ask("network", "ls", "--format", "{{.Name}}")
    assert not [name for name in networks.split() if name.endswith(("_egress", "_cluster")) and "routes" in name]
