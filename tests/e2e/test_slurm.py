"""Runs as jobs of the Slurm that `.ci/slurm` sets up: the weights of local processes, whatever happens to the job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.run.folder import RunFolder
from cluster.runtime import slurm
from cluster.system.json_files import read_json
from tests.e2e.scenario import ROOT, Clusters, step_of, summary
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
def job(clusters: Clusters, request: pytest.FixtureRequest) -> Iterator[RunFolder]:
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


def test_a_job_trains_to_the_weights_of_local_processes(job: RunFolder, clusters: Clusters, local_hash: str) -> None:
    await_same_weights(clusters, job, local_hash)
    (attempt,) = (job.control / "slurm").iterdir()
    assert 2 == len({read_json(attempt / f"{task}.json")["node"] for task in ("chief", "worker-0", "worker-1")})


def test_a_job_is_scaled_and_stopped_like_any_run(job: RunFolder, clusters: Clusters, local_hash: str) -> None:
    clusters.invoke("chaos", "kill", "worker-1", timeout_s=300)
    clusters.invoke("scale", "--workers=1", f"--run={job.name}", timeout_s=300)
    assert 2 == len(job.load_cluster().tasks)
    clusters.invoke("stop", job.name)
    assert "stopped" == summary(job)["state"]
    wait_for(lambda: not number_of(job), "the end of the job")
    clusters.invoke("up", f"--resume={job.name}", "--tensorboard-port=0", timeout_s=400)
    assert "succeeded" == summary(job)["state"]


def end_node(run: RunFolder) -> None:
    """End the node of worker-1 as a power cut would: its daemon, and all that the job has there."""
    (place,) = (run.control / "slurm").glob("*/worker-1.json")
    node = read_json(place)["node"]
    assert node != read_json(place.with_name("chief.json"))["node"]
    os.kill(int((DAEMONS / f"{node}.pid").read_text()), signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if {f"SLURMD_NODENAME={node}".encode(), f"RUN_DIR={run.path}".encode()} <= set(variables):
                stepd = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                for pid in {int(process.name), *([stepd] if b"slurmstepd" in cmdline(stepd) else [])}:
                    os.kill(pid, signal.SIGKILL)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


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
@pytest.mark.parametrize("event", [end_node, end_time, preempt])
def test_a_job_that_loses_its_nodes_goes_on_elsewhere(
    event: Callable[[RunFolder], None], job: RunFolder, clusters: Clusters, local_hash: str
) -> None:
    wait_for(lambda: step_of(job) >= 80, "step 80")
    event(job)
    try:
        wait_for(lambda: len(list((job.control / "slurm").iterdir())) > 1, "a second attempt", timeout_s=200)
    finally:
        limit(job, 60)
        subprocess.run(["bash", ".ci/slurm"], cwd=ROOT, check=True)
    await_same_weights(clusters, job, local_hash)
