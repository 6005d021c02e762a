"""The main job: topologies train, repeat themselves bit for bit, and agree with each other."""

import os
import signal
import subprocess
import sys

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import read_json
from tests.e2e.scenario import DATA, ROOT, TRAINING, losses, step_of, summary
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("data")

LONGER = (
    *("--max-steps", "100", "--global-batch", "192"),
    *("--optimizer.name", "adamw", "--optimizer.schedule", "cosine", "--optimizer.ema", "0.9"),
)
"""For what is done to a run while it trains: slower steps, more of them, and an optimizer that keeps all it can."""


@pytest.fixture(scope="module")
def longer(clusters) -> RunFolder:
    """Chief and two workers, undisturbed for as many steps as those that are stopped and frozen."""
    return clusters.up("longer", f"--workers=2 -- {' '.join(LONGER)}")


@pytest.mark.long  # `test_storms.py` stops and resumes a run too
def test_a_stopped_run_must_go_on_as_if_it_had_not_stopped(clusters, longer):
    words = ("up", "--name=stopped", "--runtime=local", "--tensorboard-port=0", "--detach")
    clusters.invoke(*words, "--", *TRAINING, *LONGER)
    run = clusters.run("stopped")
    wait_for(lambda: step_of(run) >= 6, "step 6")
    assert run.request_stop("a test")  # at once, as the run would do many steps while a command starts
    wait_for(run.summary.exists, "the run's end")
    stopped_at = summary(run)["steps"]
    assert "stopped" == summary(run)["state"]
    assert 6 <= stopped_at < 100
    assert [stopped_at] * 3 == [beat.step for beat in run.heartbeats().values()]
    clusters.invoke("up", "--resume=stopped", "--runtime=local", "--tensorboard-port=0")
    assert ("succeeded", 100) == (summary(run)["state"], summary(run)["steps"])
    assert summary(longer)["weights_sha256"] == summary(run)["weights_sha256"]
    assert losses(longer) == losses(run)


@pytest.mark.long
def test_a_frozen_worker_must_be_noticed_and_the_run_end_with_the_same_bits(clusters, longer):
    words = ("up", "--name=frozen", "--runtime=local", "--tensorboard-port=0", "--detach", "--checkpoint-every=5")
    clusters.invoke(*words, "--", *TRAINING, *LONGER)
    run = clusters.run("frozen")
    wait_for(lambda: step_of(run) >= 10, "step 10")
    os.kill(pid_of(run, "worker-0", "program"), signal.SIGSTOP)
    clusters.invoke("wait", "--timeout=240")
    (restart,) = summary(run)["restarts"]
    assert restart["steps_lost"] <= 5
    assert summary(longer)["weights_sha256"] == summary(run)["weights_sha256"]


@pytest.mark.long
def test_a_damaged_checkpoint_must_be_passed_over(clusters):
    whole = clusters.up("whole", "--workers=0 --checkpoint-every=10 -- --max-steps 40")
    damaged = clusters.up("damaged", "--workers=0 --checkpoint-every=10 -- --max-steps 30")
    newest = damaged.checkpoints / "ckpt-30.data-00000-of-00001"
    newest.write_bytes(newest.read_bytes()[:-1])
    clusters.invoke("up", "--resume=damaged", "--runtime=local", "--tensorboard-port=0", "--", "--max-steps", "40")
    log = damaged.log("chief").read_text()
    assert "warning: checkpoint of step 30 is damaged (ckpt-30.data-00000-of-00001 has" in log
    assert [20] == [event.step for event in damaged.events() if event.event == "restored"]
    assert summary(whole)["weights_sha256"] == summary(damaged)["weights_sha256"]


@pytest.mark.long
def test_a_streamed_run_must_go_on_in_the_middle_of_an_epoch(clusters):
    words = "--workers=0 -- --source stream --max-steps"
    whole = clusters.up("streamed", f"{words} 30")
    halved = clusters.up("streamed-halves", f"{words} 15")
    clusters.invoke("up", "--resume=streamed-halves", "--runtime=local", "--tensorboard-port=0", "--", "--max-steps=30")
    assert losses(whole) == losses(halved)
    assert summary(whole)["weights_sha256"] == summary(halved)["weights_sha256"]


def test_truncated_data_must_end_in_one_line(clusters, tmp_path):
    arrays = tmp_path / "arrays" / "fashion_mnist-3.0.1"
    arrays.mkdir(parents=True)
    for path in (DATA / "arrays" / "fashion_mnist-3.0.1").iterdir():
        (arrays / path.name).write_bytes(path.read_bytes())
    features = arrays / "train_features.bin"
    with features.open("r+b") as file:
        file.truncate(1000)
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "up", "--name=truncated", "--runtime=local", "--tensorboard-port=0"],
        cwd=ROOT,
        env=os.environ | {"RUNS_DIR": str(clusters.runs_dir), "DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 != done.returncode
    assert 1 == done.stderr.count("\n"), done.stderr
    assert features.name in done.stderr
    assert "--fresh" in done.stderr
    assert not clusters.run("truncated").path.exists()


@pytest.mark.long
def test_three_epochs_must_end_above_088(clusters):
    clusters.invoke("up", "--name=full", "--runtime=local", "--tensorboard-port=0", timeout_s=500)
    ended = summary(clusters.run("full"))
    assert ended["metrics"]["eval_accuracy"] > 0.88


def pid_of(run: RunFolder, task: str, which: str) -> int:
    """Return the process id of a task's `agent` or `program`, once there is one."""
    wait_for(run.programs(task).exists, f"the program of {task}")
    return read_json(run.programs(task))[which]["pid"]
