"""Runs as jobs of the Slurm that `.ci/slurm` sets up: the weights of local processes, whatever happens to the job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import spec
from cluster.control import watch
from cluster.run.folder import RunFolder
from cluster.runtime.job import Job
from cluster.runtime.slurm import batch
from cluster.runtime.slurm import runtime as slurm
from cluster.system.json_files import read_json, write_json
from tests.e2e.scenario import ROOT, Clusters, summary
from tests.waiting import wait_for

pytestmark = [pytest.mark.alone]
STEPS = "400"
TRAINING = (f"--max-steps={STEPS}", "--log-every=10", "--checkpoint-every=40", "--evaluate-every=100000")
OPTIONS = ("--runtime=slurm", "--tensorboard-port=0", "--detach")
DAEMONS = Path("/var/lib/tf-cluster-slurm")


@pytest.fixture(scope="module", autouse=True)
def site() -> None:
    """A Slurm with three nodes, of `.ci/slurm`: its nodes may be killed."""
    found = slurm.Slurm().probe()
    if not found.ready or not (DAEMONS / "n3.pid").exists():
        pytest.skip(f"no Slurm of .ci/slurm answers: {found.detail}")


@pytest.fixture(scope="module")
def local_hash(clusters: Clusters) -> str:
    """The weights of the same training as local processes."""
    clusters.invoke("up", "--name=as-processes", "--runtime=local", "--tensorboard-port=0", "--", *TRAINING)
    return summary(clusters.run("as-processes"))["weights_sha256"]


@pytest.fixture
def job(clusters: Clusters, local_hash: str, request: pytest.FixtureRequest) -> Iterator[RunFolder]:
    """A run that trains as a job, called after the test."""
    name = request.node.name[:40]
    clusters.invoke("up", f"--name={name}", *OPTIONS, "--", *TRAINING)
    yield clusters.run(name)
    clusters.invoke("down", name)


def number_of(run: RunFolder) -> str:
    command = ["squeue", "--me", "--noheader", "--format=%i", f"--name={slurm.job_name(run)}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def await_same_weights(clusters: Clusters, run: RunFolder, expected: str) -> None:
    clusters.invoke("wait", run.name, timeout_s=400)
    assert ("succeeded", expected) == (summary(run)["state"], summary(run)["weights_sha256"])


def test_a_job_must_train_to_the_weights_of_processes(job: RunFolder, clusters: Clusters, local_hash: str) -> None:
    await_same_weights(clusters, job, local_hash)
    (attempt,) = (job.control / "slurm").iterdir()
    assert 2 == len({read_json(attempt / f"{task}.json")["node"] for task in ("chief", "worker-0", "worker-1")})


def test_a_script_must_run_in_every_task_of_a_job(clusters: Clusters, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, os\nprint('task', json.loads(os.environ['TF_CONFIG'])['task'])\n")
    clusters.invoke("up", "--name=script", "--runtime=slurm", "--tensorboard-port=0", f"--script={script}")
    run = clusters.run("script")
    assert "succeeded" == summary(run)["state"]
    for index, task in enumerate(("chief", "worker-0", "worker-1")):
        assert f"task {{'type': 'worker', 'index': {index}}}" in run.log(task).read_text()


def test_a_job_must_be_scaled_and_stopped_like_any_run(clusters: Clusters) -> None:
    clusters.invoke("up", "--name=scaled", *OPTIONS, "--", *TRAINING, "--max-steps=20000", "--epochs=1000")
    run = clusters.run("scaled")
    clusters.invoke("chaos", "kill", "worker-1", timeout_s=300)
    clusters.invoke("scale", "--workers=1", "--run=scaled", timeout_s=300)
    assert 2 == len(run.load_cluster().tasks)
    clusters.invoke("stop", "scaled")
    assert "stopped" == summary(run)["state"]
    wait_for(lambda: not number_of(run), "the end of the job")
    steps = str(summary(run)["steps"] + 20)
    clusters.invoke("up", "--resume=scaled", "--tensorboard-port=0", "--", f"--max-steps={steps}", timeout_s=400)
    assert ("succeeded", "slurm") == (summary(run)["state"], run.started["runtime"])


PROGRAM = """
import os, time
from pathlib import Path
from cluster.run import launch_records, records
from cluster.run.folder import RunFolder

RunFolder.load_cluster = lambda self: records.read(Path(os.environ["CLUSTER_JSON"]), launch_records.cluster)
import tests.unit.trainer as trainer

trainer.train(1)
if trainer.GENERATION == 0:
    while not trainer._stop:
        time.sleep(0.05)
    trainer.finish("stopped")
trainer.train(5)
trainer.meet()
trainer.finish()
"""
"""Trains, without TensorFlow, until it is asked to save and end; what goes on in a later generation ends well."""


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[RunFolder]:
    """A run of such programs that is under way, on two of the three nodes."""
    run = RunFolder(tmp_path / "a-run")
    run.create()
    (run.path / "pids").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    cluster = spec.build(workers=2)
    for path, value in {run.cluster: cluster.to_json(), run.config: {}, run.control / "started.json": {}}.items():
        write_json(path, value)
    run.begin_generation(0)
    environment = {"RUN_DIR": str(run.path), "DATA_DIR": str(tmp_path), "PATH": os.environ["PATH"], "WARM_SPARE": "0"}
    environment |= {"PYTHONPATH": str(ROOT)}
    words = ["--", sys.executable, str(tmp_path / "program.py")]
    script = batch.script(cluster, slurm.job_name(run), run.path, Job(), environment, words)
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["sbatch", str(tmp_path / "job.sh")], check=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: [beat["state"] for beat in run.heartbeats().values()] == ["training"] * 3, "training")
    yield run
    subprocess.run(["bash", ".ci/slurm"], cwd=ROOT, check=True)
    subprocess.run(["scancel", f"--name={slurm.job_name(run)}"], check=True)
    wait_for(lambda: not number_of(run), "the end of the job")


def end_node(run: RunFolder) -> None:
    """End the node of worker-1 as a power cut would: its daemon, and all that the job has there."""
    (place,) = (run.control / "slurm").glob("*/worker-1.json")
    node = read_json(place)["node"]
    assert node != read_json(place.with_name("chief.json"))["node"]
    os.kill(int((DAEMONS / f"{node}.pid").read_text()), signal.SIGKILL)
    for process in processes_with(SLURMD_NODENAME=node, RUN_DIR=str(run.path)):
        os.kill(process, signal.SIGKILL)


def end_task(run: RunFolder) -> None:
    """End a task of the job, with its agent."""
    for process in processes_with(SLURM_PROCID="2", RUN_DIR=str(run.path)):
        os.kill(process, signal.SIGKILL)


def processes_with(**variables: str) -> list[int]:
    """Return the processes that have these variables, and the daemons of Slurm that started them."""
    expected = {f"{name}={value}".encode() for name, value in variables.items()}
    found: dict[int, None] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if expected <= set((process / "environ").read_bytes().split(b"\0")):
                found[int(process.name)] = None
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if "SLURMD_NODENAME" in variables and b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found[parent] = None
    return list(found)


def end_time(run: RunFolder) -> None:
    """Have the job's time end in two minutes, by which it is warned at once."""
    limit(run, 2)


def limit(run: RunFolder, minutes: int) -> None:
    subprocess.run(["scontrol", "update", f"jobid={number_of(run)}", f"TimeLimit={minutes}"], check=True)


def preempt(run: RunFolder) -> None:
    """Queue a job that takes all nodes in a partition that goes first."""
    command = ["sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.long
@pytest.mark.parametrize("event", [end_node, end_task, end_time, preempt])
def test_a_job_that_loses_its_nodes_must_go_on_once_it_has_some(
    event: Callable[[RunFolder], None], queued: RunFolder
) -> None:
    event(queued)
    wait_for(lambda: len(list((queued.control / "slurm").iterdir())) > 1, "a second attempt", timeout_s=240)
    limit(queued, 60)
    wait_for(lambda: queued.ended, "the end of the run", timeout_s=120)
    assert ("succeeded", True) == (summary(queued)["state"], queued.generation > 0)


def test_a_job_that_is_cancelled_must_save_and_not_be_queued_again(queued: RunFolder) -> None:
    subprocess.run(["scancel", number_of(queued)], check=True)
    wait_for(lambda: not number_of(queued), "the end of the job")
    assert "stopped" == (queued.outcome or {})["state"]
    assert "stopped" == watch.follow(queued, lambda _: None, 60)["state"]
