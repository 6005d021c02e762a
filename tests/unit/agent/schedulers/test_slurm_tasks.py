"""The tasks of a Slurm job: where they are, what the chief makes of that, and whether the job is queued again."""

import contextlib
import os
import shutil
import socket
from typing import Any

import pytest

from cluster.agent.schedulers import lifecycle, slurm
from cluster.agent.schedulers.slurm import Replacements
from cluster.contract import spec
from cluster.contract.run import launch_records, records
from cluster.contract.run.folder import TASK_LOST, RunFolder
from cluster.contract.run.joining import TaskCopy
from cluster.contract.run.records import AfterStop
from cluster.system import processes
from cluster.system.errors import EXIT_PEER_LOST, EXIT_PREREQUISITE, PrerequisiteError, TimedOut
from cluster.system.json_files import write_json


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    """The folder of a run with a worker that a job is about to start, as `up` leaves it."""
    folder = RunFolder(tmp_path / "a-run")
    folder.create()
    write_json(folder.cluster, spec.build(workers=1).to_json())
    folder.begin_generation(0)
    monkeypatch.setenv("RUN_DIR", str(folder.path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n9")
    monkeypatch.setenv("RENDEZVOUS_TIMEOUT_S", "0.1")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    return folder


def take_places(run: RunFolder, *names: str) -> None:
    for at, name in enumerate(names):
        address = {"node": f"n{at}", "host": f"node-{at}", "port": 20000 + at, "job": "7"}
        write_json(slurm.places(run) / f"{name}.json", address)


def assemble(run: RunFolder) -> None:
    take_places(run, "chief", "worker-0")
    cluster = slurm.assemble(run)
    assert cluster == slurm.await_cluster(run, "worker-0")
    assert spec.build(workers=1) == run.load_cluster()  # as it was checked and signed for


@pytest.mark.parametrize("stopped", [True, False])
def test_a_job_that_runs_again_continues_in_a_new_generation_elsewhere(run, stopped, monkeypatch):
    assemble(run)
    monkeypatch.setattr(slurm, "LATER_S", 0.0)
    write_json(run.status("chief"), {"task": "chief", "state": "training", "updated_at": 1.0})
    run.request_stop(slurm.TIME_LIMIT, then=AfterStop.REQUEUE)
    if stopped:
        run.end("stopped", task="chief")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take_places(run, "worker-0")
    with pytest.raises(TimedOut):
        slurm.await_cluster(run, "worker-0")  # not that of the first attempt
    assemble(run)
    assert (1, None, False, {}) == (run.generation, run.outcome, run.stop_requested, run.heartbeats())


def test_a_run_that_ended_stays_ended(run):
    run.end("succeeded", task="chief")
    assemble(run)
    assert "succeeded" == run.outcome.state


def test_a_task_that_does_not_start_is_waited_for_only_so_long_and_an_elastic_run_does_without_a_worker(run):
    take_places(run, "chief")
    with pytest.raises(TimedOut, match="worker-0"):
        slurm.assemble(run)
    write_json(run.control / "started.json", {"min_workers": 0})
    assert ["node-0:20000", "worker-0:2222"] == [task.address for task in slurm.assemble(run).tasks]
    (slurm.places(run) / "chief.json").unlink()
    with pytest.raises(TimedOut, match="chief"):
        slurm.assemble(run)


@pytest.mark.parametrize(
    ("outcome", "then", "code"),
    [
        (None, "", EXIT_PEER_LOST),
        ("stopped", AfterStop.REQUEUE, EXIT_PEER_LOST),
        ("stopped", "", 130),
        ("stopped", AfterStop.SCALE, 130),
        ("succeeded", "", 0),
        ("failed", "", 1),
    ],
)
def test_a_job_is_queued_again_unless_its_run_has_come_to_its_end(run, outcome, then, code):
    assemble(run)
    run.request_stop("somebody", then=then)
    if outcome:
        run.end(outcome, task="chief")
    assert code == slurm.result(run)


def test_a_job_whose_tasks_never_started_is_not_queued_again_forever(run):
    take_places(run, "chief")
    assert 1 == slurm.result(run)
    outcome = run.outcome
    assert ("failed", True) == (outcome.state, outcome.error.startswith("worker-0 did not start"))


def test_a_node_that_lacks_the_folder_of_the_run_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr(slurm.os, "access", lambda *_: False)
    assert EXIT_PREREQUISITE == slurm.main(["task", "bash"])
    shutil.rmtree(run.path)
    assert EXIT_PREREQUISITE == slurm.main(["task", "bash"])
    assert ["error: n9"] * 2 == [line[:9] for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [((0, "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1\n", ""), "10.0.0.1"), ((1, "", "no"), None)],
)
def test_a_node_is_where_slurm_reaches_it(answer, expected, monkeypatch):
    monkeypatch.setattr(slurm.processes, "run", lambda *_: answer)
    with contextlib.nullcontext() if expected else pytest.raises(PrerequisiteError):
        assert expected == slurm.node_address("n1")


def test_tasks_on_one_node_get_separate_ports(run):
    first, second = (slurm.task_port("127.0.0.1", number) for number in (0, 1))
    assert first != second
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        assert slurm.task_port("127.0.0.1", 0) not in (first, second)


def test_an_agent_that_is_killed_is_started_again(tmp_path, run, monkeypatch):
    monkeypatch.setattr(lifecycle.signal, "signal", lambda *_: None)
    words: list[Any] = ["bash", "-c", f"[ -e {tmp_path}/again ] && exit 3; touch {tmp_path}/again; kill -9 $$"]
    assert 3 == slurm.keep_agent(words, run, TaskCopy.register(run, "chief"))


@pytest.mark.parametrize(("by", "requeued"), [(TASK_LOST, [["scontrol", "requeue", "7"]]), (slurm.TIME_LIMIT, [])])
def test_one_task_queues_the_job_again_that_has_lost_another(run, by, requeued, monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(slurm.processes, "run", lambda command, _: commands.append(command) or (0, "", ""))
    monkeypatch.setattr(slurm.os, "environ", dict(os.environ))
    slurm.places(run).mkdir(parents=True)
    run.request_stop(by, then=AfterStop.REQUEUE)
    for name in ("worker-0", "chief"):
        monkeypatch.setattr(slurm, "_join", lambda _, name=name: (run.load_cluster(), run.load_cluster().task(name)))
        assert 0 == slurm.main(["task", "true"])
    assert requeued == commands


@pytest.mark.parametrize(
    ("task", "elastic", "began", "code", "ended"),
    [
        ("worker-0", False, False, 3, True),
        ("chief", True, False, 1, True),
        ("worker-0", True, False, 3, False),
        ("worker-0", False, True, 1, False),
        ("worker-0", False, False, EXIT_PEER_LOST, False),
    ],
)
def test_an_agent_that_fails_before_it_begins_ends_the_run(run, monkeypatch, task, elastic, began, code, ended):
    monkeypatch.setattr(slurm.os, "environ", dict(os.environ))
    monkeypatch.setattr(slurm, "_join", lambda _: (run.load_cluster(), run.load_cluster().task(task)))
    write_json(run.control / "started.json", {"min_workers": 0} if elastic else {})
    if began:
        write_json(run.status(task), {"task": task, "state": "training", "updated_at": 1.0})
    assert code == slurm.main(["task", "bash", "-c", f"exit {code}"])
    outcome = run.outcome
    assert (("failed", task, code) if ended else None) == (outcome and (outcome.state, outcome.task, outcome.exit_code))


@pytest.mark.parametrize("left_out", [True, False])
def test_the_end_of_a_replacements_time_stops_only_a_run_that_has_it(run, left_out, monkeypatch):
    monkeypatch.setenv(slurm.REPLACED_TASK, "worker-0")
    run.begin_generation(1, left_out=["worker-0"] if left_out else [])
    assert 0 == slurm.main(["stop"])
    assert left_out != run.stop_requested
    run.end("stopped", task="chief")
    assert (0, 0) == (slurm.main(["result"]), slurm.main(["task", "bash"]))


# Replacements of lost tasks: when one is queued, and how it comes into the cluster


class Queue:
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
        """Return the jobs that are queued at a look at a run that continues without these tasks."""
        self.run.begin_generation(self.run.generation + 1, left_out=list(left_out))
        self.commands.clear()
        self.replacements.look()
        return [words for words in self.commands if words[0] == "sbatch"]


@pytest.fixture
def queue(make_run, monkeypatch) -> Queue:
    site = Queue(make_run(workers=2))
    monkeypatch.setenv("SLURM_JOB_NAME", "a-job")
    monkeypatch.setattr(processes, "run", site.answer)
    return site


def test_a_lost_task_is_queued_once_and_withdrawn_when_it_is_back(queue):
    (job,) = queue.look("worker-1")
    assert {"--job-name=a-job.worker-1", "--ntasks=1", "--no-requeue"} <= set(job)
    assert "--export=ALL,REPLACED_TASK=worker-1,ATTEMPT=7.0" in job
    assert str(queue.run.control / "job.sh") == job[-1]
    queue.now = 1000.0
    assert [] == queue.look("worker-1")
    queue.look()
    assert set() == queue.queued


def test_one_that_ends_is_queued_again_after_growing_pauses(queue):
    times = []
    for second in range(200):
        queue.now = float(second)
        times += [second] * len(queue.look("worker-1"))
        queue.queued.clear()
    assert [0, 10, 70, 190] == times


def test_a_site_that_takes_no_jobs_from_its_nodes_does_no_harm(queue):
    queue.refusal = "sbatch: error: Access/permission denied"
    assert 1 == len(queue.look("worker-1"))
    assert [] == queue.look("worker-1")


def test_a_task_is_where_its_replacement_is_only_while_the_run_does_without_it(queue):
    write_json(queue.folder / "worker-1.json", {"node": "n9", "host": "node-9", "port": 20009, "job": "8"})
    for left_out, moved in (((), False), (("worker-1",), True)):
        queue.look(*left_out)
        cluster = records.read_record(queue.folder / "cluster.json", launch_records.cluster)
        assert moved == (cluster.task("worker-1").address == "node-9:20009")
    assert cluster.task("worker-0") == queue.run.load_cluster().task("worker-0")


def test_what_is_queued_ends_with_the_run(queue):
    queue.look("worker-0", "worker-1")
    with queue.replacements:
        assert {"a-job.worker-0", "a-job.worker-1"} == queue.queued
    assert set() == queue.queued
    queue.run.end("stopped", task="chief")
    queue.now = 1000.0
    assert [] == queue.look("worker-0")
