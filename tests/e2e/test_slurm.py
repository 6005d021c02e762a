"""Runs as jobs of the Slurm that `.ci/slurm` sets up: the weights of local processes, whatever happens to the job."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.schedulers import slurm_runtime as slurm
from cluster.host.schedulers.slurm_runtime import Queue
from cluster.system.json_files import read_json
from tests.e2e.scenario import ENDLESS, ROOT, Clusters, await_members, step_of, summary
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.alone]
SAVING = "--checkpoint-every=40"
TRAINING = ("--log-every=10", "--evaluate-every=100000")
STEPS = "--max-steps=400"
OPTIONS = (SAVING, "--detach")
SMALL = ("--global-batch=48", "--steps-per-loop=5", *TRAINING)
DAEMONS = Path("/var/lib/tf-cluster-slurm")


@pytest.fixture(scope="module", autouse=True)
def site(unavailable):
    """A Slurm with three nodes, of `.ci/slurm`: its nodes may be killed."""
    found = slurm.Slurm().probe()
    if not found.ready or not (DAEMONS / "n3.pid").exists():
        unavailable(f"no Slurm of .ci/slurm answers: {found.detail}")


@pytest.fixture(scope="module")
def local_hash(clusters) -> str:
    """The weights of the same training as local processes."""
    return trained_locally(clusters, "as-processes", STEPS)


def trained_locally(clusters: Clusters, name: str, steps: str) -> str:
    return summary(clusters.up(name, SAVING, training=(*TRAINING, steps)))["weights_sha256"]


@pytest.fixture
def job(clusters, local_hash, request) -> Iterator[RunFolder]:
    """A run that trains as a job on two of the three nodes, called after the test."""
    yield from queued(clusters, request.node.name, STEPS)


@pytest.fixture
def long_job(clusters, request) -> Iterator[RunFolder]:
    """A run that trains as a job until it is stopped."""
    yield from queued(clusters, request.node.name, *ENDLESS)


def queued(clusters: Clusters, name: str, *training: str) -> Iterator[RunFolder]:
    name = re.sub("[^a-z0-9]+", "-", name)[-40:].strip("-")
    run = clusters.up(name, "--nodes=2", *OPTIONS, runtime="slurm", training=(*TRAINING, *training))
    wait_for(lambda: step_of(run) >= 60, "step 60", timeout_s=120)
    yield run
    revive_nodes()
    clusters.invoke("down", run.name)


def number_of(run: RunFolder) -> str:
    command = ["squeue", "--me", "--noheader", "--format=%i", f"--name={slurm.job_name(run)}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def attempts(run: RunFolder) -> list[Path]:
    """Return the folders in which the tasks of each attempt of the job recorded where they are."""
    return sorted((run.control / "slurm").iterdir())


@pytest.mark.site
def test_a_job_must_train_to_the_weights_of_processes(clusters, local_hash):
    run = clusters.up("three", "--nodes=3", SAVING, runtime="slurm", training=(*TRAINING, STEPS))
    assert ("succeeded", local_hash) == (summary(run)["state"], summary(run)["weights_sha256"])
    (attempt,) = attempts(run)
    places = [read_json(attempt / f"{task}.json") for task in ("chief", "worker-0", "worker-1")]
    assert 3 == len({place["host"] for place in places})
    assert not number_of(run)


@pytest.mark.site
def test_a_script_must_run_in_every_task_of_a_job(clusters, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import json, os\nprint('task', json.loads(os.environ['TF_CONFIG'])['task'])\n")
    run = clusters.up("script", f"--script={script}", runtime="slurm", training=())
    assert "succeeded" == summary(run)["state"]
    for index, task in enumerate(("chief", "worker-0", "worker-1")):
        assert f"task {{'type': 'worker', 'index': {index}}}" in run.log(task).read_text()


def test_every_command_must_mean_the_same_for_a_job(clusters, long_job):
    name = f"--run={long_job.name}"
    status = json.loads(clusters.invoke("status", "--json", name))
    assert ("training", 3) == (status["state"], len(status["tasks"]))
    assert "step 60/" in clusters.invoke("logs", "chief", name)
    clusters.invoke("chaos", "kill", "worker-1", timeout_s=300)
    clusters.invoke("scale", "--workers=1", name, timeout_s=300)
    assert 2 == len(long_job.load_cluster().tasks)
    clusters.invoke("stop", long_job.name)
    assert "stopped" == summary(long_job)["state"]
    wait_for(lambda: not number_of(long_job), "the end of the job")
    words = (f"--resume={long_job.name}", "--tensorboard-port=0")
    clusters.invoke("up", *words, "--", f"--max-steps={summary(long_job)['steps'] + 20}", timeout_s=400)
    assert ("succeeded", "slurm") == (summary(long_job)["state"], long_job.started.runtime)


def end_node(run: RunFolder) -> None:
    """End the node of worker-1 as a power cut would: its daemon, and all that the job has there."""
    (attempt,) = attempts(run)
    node = read_json(attempt / "worker-1.json")["node"]
    assert node != read_json(attempt / "chief.json")["node"]
    os.kill(int((DAEMONS / f"{node}.pid").read_text()), signal.SIGKILL)
    for process in processes_with(SLURMD_NODENAME=node, RUN_DIR=str(run.path)):
        os.kill(process, signal.SIGKILL)


def end_task(run: RunFolder) -> None:
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


def preempt(_: RunFolder) -> None:
    """Queue a job that takes all nodes in a partition that goes first."""
    command = ["sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("event", [end_node, end_task, preempt])
def test_a_job_that_loses_its_nodes_must_continue_once_it_has_some(event, job, clusters, local_hash):
    event(job)
    clusters.invoke("wait", job.name, timeout_s=400)
    assert ("succeeded", local_hash) == (summary(job)["state"], summary(job)["weights_sha256"])
    assert (2, True) == (len(attempts(job)), job.generation > 0)


@pytest.fixture
def elastic_job(clusters, monkeypatch) -> Iterator[Callable[..., RunFolder]]:
    """Starts an elastic run that trains on three nodes until it is stopped."""
    monkeypatch.setitem(clusters.environment, "RENDEZVOUS_TIMEOUT_S", "20")
    begun: list[RunFolder] = []

    def begin(name: str, *words: str) -> RunFolder:
        words = ("--nodes=3", *OPTIONS, "--min-workers=1", "--bitwise-elastic=4", *words)
        begun.append(clusters.up(name, *words, runtime="slurm", training=(*SMALL, *ENDLESS)))
        wait_for(lambda: step_of(begun[-1]) >= 60, "step 60", timeout_s=120)
        return begun[-1]

    yield begin
    revive_nodes()
    for run in begun:
        clusters.invoke("down", run.name)


def revive_nodes() -> None:
    subprocess.run(["bash", ".ci/slurm"], cwd=ROOT, check=True)


def test_an_elastic_job_must_replace_a_task_whose_node_died(elastic_job, clusters):
    run = elastic_job("grows", "--grow")
    (attempt,) = attempts(run)
    lost = read_json(attempt / "worker-1.json")
    end_node(run)
    await_members(run, "worker-1")
    await_members(run)
    place = read_json(attempt / "worker-1.json")
    assert place["job"] != lost["job"] == number_of(run)  # it was never queued again
    assert place["node"] != lost["node"]  # which is still away
    clusters.invoke("chaos", "kill", "worker-1", "--run=grows", timeout_s=300)
    clusters.check_bits(run, "--bitwise-elastic=4", training=SMALL)
    wait_for(lambda: not Queue().jobs(slurm.job_name(run), parts=True), "the end of all jobs of the run")


def test_an_elastic_job_must_continue_without_a_node_until_it_is_scaled(elastic_job, clusters):
    run = elastic_job("outlives")
    end_node(run)
    await_members(run, "worker-1")
    assert 1 == len(attempts(run))
    revive_nodes()
    clusters.invoke("scale", "--workers=2", "--run=outlives", timeout_s=300)
    await_members(run)
    clusters.check_bits(run, "--bitwise-elastic=4", training=SMALL)


def test_a_job_at_its_time_limit_must_save_and_continue(long_job, clusters):
    limit(long_job, 2)  # it is warned two minutes before: by then Slurm looks only every 30 s
    wait_for(lambda: len(attempts(long_job)) > 1, "a second attempt", timeout_s=240)
    limit(long_job, 60)
    wait_for(lambda: steps_of(long_job, "restored"), "the checkpoint to be restored", timeout_s=240)
    assert steps_of(long_job, "stopped")[:1] == steps_of(long_job, "restored")  # nothing is done twice
    began = steps_of(long_job, "restored")[0]
    wait_for(lambda: step_of(long_job) > began, "a step of the second attempt", timeout_s=240)
    clusters.invoke("stop", long_job.name)
    steps = f"--max-steps={summary(long_job)['steps'] + 20}"
    clusters.invoke("up", f"--resume={long_job.name}", "--tensorboard-port=0", "--", steps, timeout_s=400)
    assert summary(long_job)["weights_sha256"] == trained_locally(clusters, "as-long", steps)


def steps_of(run: RunFolder, event: str) -> list[int]:
    return [each.step for each in run.events() if (each.task, each.event) == ("chief", event)]


def limit(run: RunFolder, minutes: int) -> None:
    subprocess.run(["scontrol", "update", f"jobid={number_of(run)}", f"TimeLimit={minutes}"], check=True)


@pytest.mark.site
def test_a_job_that_is_cancelled_must_save_and_not_be_queued_again(job, clusters, local_hash):
    subprocess.run(["scancel", number_of(job)], check=True)
    wait_for(lambda: not number_of(job), "the end of the job")
    clusters.invoke("wait", job.name, expect=130)
    assert "stopped" == summary(job)["state"]
    assert 1 == len(attempts(job))
    clusters.invoke("up", f"--resume={job.name}", "--tensorboard-port=0", timeout_s=400)
    assert ("succeeded", local_hash) == (summary(job)["state"], summary(job)["weights_sha256"])
