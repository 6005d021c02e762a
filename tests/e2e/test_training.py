"""The main job: topologies train, repeat themselves bit for bit, and agree with each other."""

import os
import signal
import subprocess
import sys

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.system.journal import read_json_lines
from cluster.system.json_files import read_json
from tests.e2e.scenario import DATA, ENDLESS, ROOT, STEPS, TRAINING, losses, step_of, summary
from tests.e2e.test_containers import containers
from tests.support.waiting import wait_for
from train.model import variables

pytestmark = pytest.mark.usefixtures("data")

LONGER = (
    *("--max-steps", "100", "--global-batch", "192"),
    *("--optimizer.name", "adamw", "--optimizer.schedule", "cosine", "--optimizer.ema", "0.9"),
)
"""For what is done to a run while it trains: slower steps, more of them, and an optimizer that keeps all it can."""


@pytest.fixture(scope="module")
def three(clusters) -> RunFolder:
    """Chief and two workers, as local processes, undisturbed."""
    return clusters.up("three")


def test_chief_and_two_workers_must_train_under_multi_worker_mirrored(three):
    ended = summary(three)
    assert ("succeeded", "MultiWorkerMirroredStrategy", 3, STEPS) == (
        ended["state"],
        ended["strategy"],
        ended["replicas"],
        ended["steps"],
    )
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
    assert {*variables.DEFAULTS, "TF_ENABLE_ONEDNN_OPTS"} <= set(read_json(three.environment)["variables"])


def test_every_task_must_log_the_same_loss(three):
    assert list(range(1, STEPS + 1)) == list(losses(three))
    assert losses(three) == losses(three, "worker-0") == losses(three, "worker-1")


@pytest.mark.long  # in containers each time
def test_the_same_seed_must_give_the_same_bits_again(clusters, three):
    output, again = clusters.rerun(three.name)
    assert f"identical: the losses of {STEPS} logged steps and the final weights are the same bits" in output
    assert summary(three)["weights_sha256"] == summary(again)["weights_sha256"]
    assert losses(three) == losses(again)


@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_containers_must_give_the_same_bits_as_processes(clusters, three):
    output, contained = clusters.rerun(three.name, "--runtime=docker")
    assert f"identical: the losses of {STEPS} logged steps and the final weights are the same bits" in output
    assert ("succeeded", STEPS) == (summary(contained)["state"], summary(contained)["steps"])
    assert "docker" == read_json(contained.manifest)["runtime"]
    assert read_json(contained.manifest)["image"]["id"].startswith("sha256:")
    assert summary(three)["weights_sha256"] == summary(contained)["weights_sha256"]
    assert losses(three) == losses(contained)
    assert {} == containers(contained)


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("require_engine", "images")
def test_processes_must_give_the_same_bits_as_containers(clusters):
    contained = clusters.up("in-containers", "--workers=1", runtime="docker")
    output, again = clusters.rerun(contained.name, "--runtime=local")
    assert f"identical: the losses of {STEPS} logged steps and the final weights are the same bits" in output
    assert "local" == read_json(again.manifest)["runtime"]


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
    assert [20] == [event["step"] for event in damaged.events() if event["event"] == "restored"]
    assert summary(whole)["weights_sha256"] == summary(damaged)["weights_sha256"]


@pytest.mark.long
def test_a_streamed_run_must_go_on_in_the_middle_of_an_epoch(clusters):
    words = "--workers=0 -- --source stream --max-steps"
    whole = clusters.up("streamed", f"{words} 30")
    halved = clusters.up("streamed-halves", f"{words} 15")
    clusters.invoke("up", "--resume=streamed-halves", "--runtime=local", "--tensorboard-port=0", "--", "--max-steps=30")
    assert losses(whole) == losses(halved)
    assert summary(whole)["weights_sha256"] == summary(halved)["weights_sha256"]


def test_first_ctrl_c_must_stop_with_a_checkpoint(clusters):
    words = ("up", "--name=interrupted", "--runtime=local", "--tensorboard-port=0", "--workers=1")
    process = clusters.popen(*words, "--", *TRAINING, *ENDLESS)
    run = clusters.run("interrupted")
    await_line(process, "Ctrl-C saves and stops")
    wait_for(lambda: step_of(run) >= 2, "step 2")
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert 130 == process.returncode, output
    assert "stopped" == summary(run)["state"]
    assert f"ckpt-{summary(run)['steps']}.index" in [path.name for path in run.checkpoints.iterdir()]
    assert "invoke up --resume interrupted" in output


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


def await_line(process: subprocess.Popen[str], words: str) -> None:
    """Read what a command prints until it says `words`."""
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"it ended without saying {words!r}"


def pid_of(run: RunFolder, task: str, which: str) -> int:
    """Return the process id of a task's `agent` or `program`, once there is one."""
    wait_for(run.programs(task).exists, f"the program of {task}")
    return read_json(run.programs(task))[which]["pid"]
