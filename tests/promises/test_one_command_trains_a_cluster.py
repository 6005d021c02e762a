"""`up` trains a chief and two workers in a terminal, leaves a complete run folder, and saves at Ctrl-C."""

import os
import re
import signal

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json, read_json_lines
from tests.e2e.scenario import ENDLESS, STEPS, TRAINING, step_of, summary
from tests.e2e.test_terminal import check_lines, show
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")


NAME = "a-run-with-a-name-as-long-as-that-of-a-preset"


@pytest.fixture(scope="module")
def lines(clusters) -> list[str]:
    """The terminal output of a chief and two workers that train as local processes, undisturbed."""
    words = ["up", f"--name={NAME}", "--workers=2", "--runtime=local", "--", *TRAINING]
    code, shown = show(words, clusters.settings | {"TERM": "xterm"})
    assert 0 == code, shown
    return check_lines(shown)


@pytest.fixture(scope="module")
def three(clusters, lines) -> RunFolder:
    """The run of that output."""
    return clusters.run(NAME)


def test_the_view_of_a_run_must_stay_while_tensorboard_starts(lines):
    address = next(at for at, line in enumerate(lines) if line.startswith("TensorBoard http"))
    first_step = next(at for at, line in enumerate(lines) if re.match(r".* step [1-9]", line))
    assert [line for line in lines[first_step + 1 : address] if line.startswith("chief ")]
    assert any(line.startswith("succeeded: ") for line in lines)


def test_chief_and_two_workers_must_train_under_multi_worker_mirrored(three):
    ended = summary(three)
    expected = {"strategy": "MultiWorkerMirroredStrategy", "replicas": 3, "steps": STEPS}
    assert {"state": "succeeded", **expected}.items() <= ended.items()
    assert {"chief": 0, "worker-0": 0, "worker-1": 0} == ended["tasks"]
    assert ended["metrics"]["eval_loss"] < 2.2  # it was 2.3, the logarithm of 10 classes
    assert 0 < ended["startup_s"] < ended["wall_s"]
    assert [] == ended["restarts"]


def test_a_run_must_leave_everything_that_the_contract_lists(three):
    kept = ("config.json", "cluster.json", "compose.json", "environment.json", "manifest.json", "events.jsonl")
    for part in (*kept, "export/saved_model.pb"):
        assert (three.path / part).exists(), part
    assert list(three.tensorboard("chief").glob("events.out.tfevents.*"))
    assert list(three.checkpoints.glob(f"ckpt-{STEPS}.index"))
    heartbeat = read_json(three.status("worker-1"))
    fields = {"task", "role", "state", "generation", "step", "examples_per_s", "loss", "restarts", "updated_at"}
    assert fields <= set(heartbeat)
    assert ("worker-1", "worker", "done", STEPS) == tuple(heartbeat[key] for key in ("task", "role", "state", "step"))
    row = next(read_json_lines(three.metrics("chief")))
    assert {"step", "epoch", "loss", "accuracy", "examples_per_s", "time"} == set(row)
    assert {"TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"} <= set(read_json(three.environment)["variables"])


def test_every_task_must_log_the_same_loss(three):
    assert list(range(1, STEPS + 1)) == list(three.losses())
    assert three.losses() == three.losses("worker-0") == three.losses("worker-1")


def test_first_ctrl_c_must_stop_with_a_checkpoint(clusters):
    words = ("up", "--name=interrupted", "--runtime=local", "--tensorboard-port=0", "--workers=1")
    process = clusters.popen(*words, "--", *TRAINING, *ENDLESS)
    run = clusters.run("interrupted")
    assert process.stdout is not None
    assert any("Ctrl-C saves and stops" in line for line in process.stdout), "it ended without saying how to stop it"
    wait_for(lambda: step_of(run) >= 2, "step 2")
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert 130 == process.returncode, output
    assert "stopped" == summary(run)["state"]
    assert f"ckpt-{summary(run)['steps']}.index" in [path.name for path in run.checkpoints.iterdir()]
    assert "invoke up --resume interrupted" in output
