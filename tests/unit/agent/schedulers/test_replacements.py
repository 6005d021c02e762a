"""Replacements of lost tasks of a Slurm job: when one is queued, and how it comes into the cluster."""

import pytest

from cluster.agent.schedulers import replacements
from cluster.agent.schedulers.replacements import Replacements
from cluster.contract.run import records
from cluster.contract.run.folder import RunFolder
from cluster.system.json_files import write_json


class Slurm:
    """A queue that takes jobs, and a clock."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.now = run, 0.0
        self.commands: list[list[str]] = []
        self.queued: set[str] = set()
        self.refusal = ""
        self.folder = run.control / "slurm" / "7.0"
        write_json(self.folder / "cluster.json", run.load_cluster().to_json())
        self.replacements = Replacements(run, self.folder, lambda: self.now)

    def answer(self, command: list[str], _timeout_s: float) -> tuple[int, str, str]:
        words = [word for word in command if not word.startswith("--unset") and word != "env"]
        self.commands.append(words)
        name = next(word.partition("=")[2] for word in words if "name=" in word)
        if words[0] == "squeue":
            return 0, "8\n" if name in self.queued else "", ""
        if words[0] == "sbatch" and self.refusal:
            return 1, "", self.refusal
        (self.queued.discard if words[0] == "scancel" else self.queued.add)(name)
        return 0, "", ""

    def look(self, *left_out: str) -> list[list[str]]:
        """Return the jobs that are queued at a look at a run that goes on without these tasks."""
        self.run.begin_generation(self.run.generation + 1, left_out=list(left_out))
        self.commands.clear()
        self.replacements.look()
        return [words for words in self.commands if words[0] == "sbatch"]


@pytest.fixture
def slurm(make_run, monkeypatch) -> Slurm:
    site = Slurm(make_run(workers=2))
    monkeypatch.setenv("SLURM_JOB_NAME", "a-job")
    monkeypatch.setattr(replacements.processes, "run", site.answer)
    return site


def test_nothing_is_queued_for_a_run_that_has_its_tasks(slurm):
    slurm.look()
    assert [] == slurm.commands


def test_a_lost_task_is_queued_once_and_withdrawn_when_it_is_back(slurm):
    (job,) = slurm.look("worker-1")
    assert {"--job-name=a-job.worker-1", "--ntasks=1", "--no-requeue"} <= set(job)
    assert "--export=ALL,REPLACED_TASK=worker-1,ATTEMPT=7.0" in job
    assert str(slurm.run.control / "job.sh") == job[-1]
    slurm.now = 1000.0
    assert [] == slurm.look("worker-1")
    slurm.look()
    assert set() == slurm.queued


def test_one_that_ends_is_queued_again_after_growing_pauses(slurm):
    times = []
    for second in range(200):
        slurm.now = float(second)
        times += [second] * len(slurm.look("worker-1"))
        slurm.queued.clear()
    assert [0, 10, 70, 190] == times


def test_a_site_that_takes_no_jobs_from_its_nodes_does_no_harm(slurm):
    slurm.refusal = "sbatch: error: Access/permission denied"
    assert 1 == len(slurm.look("worker-1"))
    assert [] == slurm.look("worker-1")


def test_a_task_is_where_its_replacement_is_only_while_the_run_does_without_it(slurm):
    place = {"node": "n9", "host": "node-9", "port": 20009, "job": "8"}
    write_json(slurm.folder / "worker-1.json", place)
    for left_out, moved in (((), False), (("worker-1",), True)):
        slurm.look(*left_out)
        cluster = records.read(slurm.folder / "cluster.json", records.cluster)
        assert moved == (cluster.task("worker-1").address == "node-9:20009")
    assert cluster.task("worker-0") == slurm.run.load_cluster().task("worker-0")


def test_what_is_queued_ends_with_the_run(slurm):
    slurm.look("worker-0", "worker-1")
    slurm.replacements.start()
    slurm.replacements.end()
    assert set() == slurm.queued
    slurm.run.end("stopped", task="chief")
    slurm.now = 1000.0
    assert [] == slurm.look("worker-0")
