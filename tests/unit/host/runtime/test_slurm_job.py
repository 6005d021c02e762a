"""The batch script of a run."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.contract import spec
from cluster.host.runtime import slurm_runtime
from cluster.host.runtime.resources import NO_JOB, Job, minutes
from cluster.system.errors import UsageError

RUN = Path("/shared/runs/a run")


def script(job: Job = NO_JOB, *, elastic: bool = False, **topology: int) -> str:
    environment, words = {"DATA_DIR": "/shared/the data"}, ["--script", "a b.py"]
    return slurm_runtime.batch_script(spec.build(**topology), "a-job", RUN, job, environment, words, elastic=elastic)


def directives(text: str) -> dict[str, str]:
    words = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_job_has_a_slurm_task_for_each_of_ours():
    assert "5" == directives(script(workers=2, ps=2))["ntasks"]


def test_what_is_left_out_is_left_to_the_site():
    assert not {"partition", "account", "time", "nodes", "gpus-per-task"} & set(directives(script()))


def test_what_is_asked_for_is_in_the_script():
    requested = {"partition": "gpu,long", "account": "lab", "time": "2-12:00", "nodes": "3"}
    found = directives(script(Job(**requested, gpus_per_task="2")))
    assert requested | {"gpus-per-task": "2"} == {name: found[name] for name in (*requested, "gpus-per-task")}


def test_the_job_saves_before_its_time_is_over_and_is_queued_again():
    found = directives(script())
    assert f"B:USR1@{slurm_runtime.SAVE_S}" == found["signal"]
    assert "requeue" in found


def test_the_job_of_an_elastic_run_outlives_its_nodes():
    srun = next(line for line in script(elastic=True).splitlines() if line.startswith("srun "))
    assert {"--no-kill", "--wait=0"} <= set(srun.split())
    assert "no-kill" in directives(script(elastic=True))
    assert "no-kill" not in script()


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/it's (1) $(false)/bin/python"])
def test_the_script_is_one_that_bash_can_read(monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    assert python in shlex.split(next(line for line in script().splitlines() if line.startswith("srun ")))
    subprocess.run(["bash", "-n"], input=script(), text=True, check=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("2-0", 2880), ("1-12:30", 2190), ("0-1:30:30", 90.5)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text, expected):
    assert expected == minutes(text)


@pytest.mark.parametrize("job", [Job(time="soon"), Job(time="1"), Job(partition="a b"), Job(account="$(x)")])
def test_what_is_no_word_for_slurm_is_refused(job):
    with pytest.raises(UsageError, match="--"):
        job.check()
