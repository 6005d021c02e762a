"""The runtime of Slurm jobs, with a Slurm that gives recorded answers."""

import contextlib
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.contract import spec
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.control import foreground
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.host.runtime import registry
from cluster.host.runtime.base import Workload
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import Job
from cluster.host.schedulers import slurm_runtime as slurm
from cluster.system import processes
from cluster.system.errors import PrerequisiteError, TimedOut, UsageError
from cluster.system.json_files import write_json
from tests.support.launching import Commands, workload


class Site:
    """A Slurm with one job, which each look finds one state further."""

    def __init__(self, run: RunFolder, *states: str) -> None:
        self.run, self.states = run, list(states)
        self.commands = Commands()
        self.questions = 0

    def answer(self, command: list[str], timeout_s: float) -> tuple[int, str, str]:
        self.questions += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state == "down":
            return 1, "", "slurm_load_jobs error: Unable to contact slurm controller"
        if command[0] == "sinfo":
            return 0, "3 idle\n", ""
        mine, another = f"12|{state}|{slurm.job_name(self.run)}\n" if state else "", "13|RUNNING|another\n"
        return 0, mine if any(word.startswith("--name=") for word in command) else mine + another, ""


@pytest.fixture
def run(make_run) -> RunFolder:
    folder = make_run("a-run", workers=1)
    write_json(folder.compose, {"runtime": "slurm", "script": ""})
    owner.create_owner(folder, "slurm")
    return folder


def site(run: RunFolder, monkeypatch: pytest.MonkeyPatch, *states: str) -> Site:
    made = Site(run, *states)
    monkeypatch.setattr(processes, "run", made.answer)
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    monkeypatch.setitem(registry.RUNTIMES, "slurm", slurm.Slurm())  # which remembers no answer
    return made


def work(run: RunFolder, **job: str) -> Workload:
    return workload(run, job=Job(**job))


@pytest.mark.parametrize(
    ("state", "alive"),
    [("PENDING", True), ("RUNNING", True), ("COMPLETING", True), ("CANCELLED", False), ("", False), ("down", True)],
)
def test_a_run_lives_while_its_job_runs_or_is_queued(run, state, alive, monkeypatch):
    site(run, monkeypatch, state)
    assert alive == slurm.Slurm().alive(run)


@pytest.mark.parametrize(
    ("states", "grace_s", "commands"),
    [
        (["RUNNING", "COMPLETING", ""], 10, []),  # it ends by itself
        (["RUNNING", "RUNNING", "COMPLETING", "COMPLETED"], 0, ["scancel --signal=KILL --full 12"]),
    ],
)
def test_a_job_that_does_not_end_is_cancelled_and_waited_for(run, monkeypatch, states, grace_s, commands):
    there = site(run, monkeypatch, *states)
    slurm.Slurm().remove(run, there.commands, grace_s)
    assert commands == there.commands


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        (["PENDING", "PENDING", "CANCELLED"], True),
        (["PENDING", "RUNNING"], False),  # it has just begun
        (["RUNNING"], False),
        (["down"], False),
    ],
)
def test_a_stop_cancels_a_job_that_has_not_begun(run, monkeypatch, states, stopped):
    site(run, monkeypatch, *states)
    monkeypatch.setattr(foreground, "POLL_S", 0.0)
    with contextlib.nullcontext() if stopped else pytest.raises(TimedOut):
        assert "stopped" == foreground.stop(run, "a test", 0.0).state


def test_replacements_of_a_runs_tasks_end_with_it(run, monkeypatch):
    there, name = site(run, monkeypatch, ""), slurm.job_name(run)
    shown = [f"14|PENDING|{name}.worker-1\n15|PENDING|{name}-else\n", ""]
    monkeypatch.setattr(
        processes,
        "run",
        lambda command, _: (0, "" if any(word.startswith("--name=") for word in command) else shown.pop(0), ""),
    )
    assert not slurm.Slurm().alive(run)
    slurm.Slurm().remove(run, there.commands, 10)
    assert ["scancel 14"] == there.commands


def test_what_is_left_is_found_by_the_name_of_its_job(run, monkeypatch):
    site(run, monkeypatch, "PENDING")
    assert {"a-run"} == slurm.Slurm().find_leftovers(run.path.parent, ["a-run", "another"])
    owner.remove_owner(run)
    there = site(run, monkeypatch, "down")
    assert set() == slurm.Slurm().find_leftovers(run.path.parent, ["a-run", "another"])
    assert 0 == there.questions


def test_a_controller_that_does_not_answer_is_asked_once_however_many_runs_there_are(run, monkeypatch):
    there, runtime = site(run, monkeypatch, "down"), slurm.Slurm()
    with pytest.raises(PrerequisiteError, match=runtime.way_back):
        runtime.find_leftovers(run.path.parent, ["a-run"])
    assert all(runtime.alive(RunFolder(run.path.parent / name)) for name in ("a-run", "b-run", "c-run"))
    with pytest.raises(PrerequisiteError):
        runtime.remove(run, there.commands, 0)
    assert 1 == there.questions


@pytest.mark.parametrize(("env", "names"), [((), "NONE"), (("A_SECRET", "ANOTHER=shown"), "A_SECRET")])
def test_the_job_is_queued_by_a_script_that_names_it_and_holds_no_value_of_the_caller_s(run, monkeypatch, env, names):
    there = site(run, monkeypatch, "")
    monkeypatch.setenv("A_SECRET", "hidden")
    queued = replace(work(run, partition="main"), payload=Payload(env=env))
    slurm.Slurm().start(queued, there.commands)
    path = run.control / "job.sh"
    text = path.read_text()
    (command,) = map(shlex.split, there.commands)
    assert ("sbatch", str(path)) == (command[0], command[-1])
    given = dict(word.removeprefix("--").partition("=")[::2] for word in command[1:-1])
    assert directives(text) | {"export": names} == given  # SBATCH_TIMELIMIT, for one, would win over the script
    assert ("hidden" in text, "shown" in text) == (False, bool(env))
    assert f"#SBATCH --job-name={slurm.job_name(run)}\n" in text
    assert "#SBATCH --partition=main\n" in text
    assert "export CUDA_VISIBLE_DEVICES=-1\n" in text
    assert text in slurm.Slurm().commands(queued)[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpus": "all"}, "--gpus"),
        ({"memory": "8GiB"}, "--memory"),
        ({"network": "private"}, "--network"),
        ({"nodes": "none"}, "--nodes"),
        ({"gpus_per_task": "2", "devices": "3"}, "--devices"),
        ({"time": "1 hour"}, "--time"),
        ({"time": "2"}, "--time"),
        ({"time": "0:02:00"}, "--time"),
        ({"time": "0-0:1"}, "--time"),
        ({"partition": "a b"}, "--partition"),
        ({"account": "$(x)"}, "--account"),
        ({"runtime": "local", "partition": "main", "nodes": 2}, "--partition and --nodes"),
    ],
)
def test_what_a_job_cannot_have_is_refused(options, named, run, monkeypatch):
    site(run, monkeypatch, "")
    with pytest.raises(UsageError, match=named):
        planning.plan(Request(**{"runtime": "slurm", "tensorboard_port": "0"} | options))


def test_a_machine_without_slurm_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PrerequisiteError, match="sinfo"):
        registry.choose_runtime("slurm")
    assert [] == slurm.Slurm().examine()


def test_a_plan_follows_what_a_task_requests_of_its_job(run, monkeypatch):
    site(run, monkeypatch, "")
    options = {"runtime": "slurm", "tensorboard_port": "0"}
    plan = planning.plan(Request(workers=0, gpus_per_task=2, cpus_per_task=5, **options))
    assert ("mirrored", 2, 5) == (plan.cluster.strategy, plan.cluster.devices, plan.config["threads"])
    assert "#SBATCH --gpus-per-task=2\n" in plan.compose["script"]
    assert "export CUDA_VISIBLE_DEVICES" not in plan.compose["script"]
    assert plan.network.warning == ""
    plan = planning.plan(Request(workers=1, **options))
    assert plan.network.warning  # nothing closes its network
    assert plan.network.warning in plan.notes


UNAVAILABLE = "allocation failure: Requested node configuration is not available"
UNKNOWN = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified"


@pytest.mark.parametrize(
    ("complaint", "nodes", "refused"),
    [
        ("", "3 idle\n", False),
        (UNKNOWN, "", True),
        ("sbatch: error: Invalid generic resource (gres) specification", "", True),
        (UNAVAILABLE, "2 idle\n1 mixed\n", True),
        (UNAVAILABLE, "2 idle\n1 down*\n", False),
        ("allocation failure: Unable to contact slurm controller (connect failure)", "", False),
    ],
)
def test_what_slurm_would_never_take_is_refused_before_anything_is_queued(complaint, nodes, refused, run, monkeypatch):
    def answer(command: list[str], _timeout_s: float) -> tuple[int, str, str]:
        if command[0] == "sinfo":
            return 0, nodes, ""
        assert ["sbatch", "--test-only"] == command[:2]
        assert {"--partition=nope", "--nodes=9", "--ntasks=2"} <= set(command)
        return int(bool(complaint)), "", complaint

    monkeypatch.setattr(processes, "run", answer)
    with pytest.raises(UsageError, match="--partition nope --nodes 9") if refused else contextlib.nullcontext():
        slurm.Slurm().preflight(work(run, partition="nope", nodes="9"))


@pytest.mark.parametrize(
    ("printed", "has_log", "expected"),
    [
        ("", False, ""),
        ("12|RUNNING|None|n1\n", False, ""),
        ("12|PENDING|Resources|n/a\n", False, "job 12 is queued: Resources"),
        ("9|FAILED|RaisedSignal|n2\n12|PENDING|Priority|n/a\n", True, "job 12 is queued: Priority"),
        ("12|PENDING|launch failed requeued held|n/a\n", False, "`scontrol release 12`"),
        ("12|FAILED|NonZeroExitCode|n1\n", False, "RUNS_DIR"),
        ("12|FAILED|NonZeroExitCode|n1\n", True, "logs/slurm.log"),
    ],
)
def test_why_no_task_is_heard_is_what_the_controller_says(printed, has_log, expected, run, monkeypatch):
    monkeypatch.setattr(processes, "run", lambda *_: (0, printed, ""))
    if has_log:
        run.log("slurm").write_text("")
    said = slurm.Slurm().scheduler_status(run)
    assert expected in said if expected else not said


def script(given: Workload) -> str:
    return slurm.batch_script(
        replace(given, data_dir=Path("/shared/the data"), payload=Payload(Path("/a b.py"), ("3 4",)))
    )


def directives(text: str) -> dict[str, str]:
    words = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_job_requests_what_is_asked_for_and_leaves_the_rest_to_the_site(run):
    requested = {"partition": "gpu,long", "account": "lab", "time": "2-12:00", "nodes": "3", "gpus_per_task": "2"}
    found = directives(script(work(run, **requested)))
    assert list(requested.values()) == [found[name.replace("_", "-")] for name in requested]
    found = directives(script(replace(work(run), cluster=spec.build(workers=2, ps=2))))
    assert not {name.replace("_", "-") for name in requested} & set(found)
    assert ("5", f"B:USR1@{slurm.SAVE_S}", True) == (found["ntasks"], found["signal"], "requeue" in found)


@pytest.mark.parametrize("limit", ["", "0", "3", "2:01", "1-0", "0-1", "0-0:03", "0-0:2:1", "UNLIMITED", "-1"])
def test_a_time_limit_that_leaves_time_to_train_is_accepted(limit):
    slurm.check_time(limit)


def test_the_job_of_an_elastic_run_survives_its_nodes(run):
    text = script(replace(work(run), elastic={"min_workers": 1}))
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    assert {"--no-kill", "--wait=0"} <= set(srun.split())
    assert "no-kill" in directives(text)
    assert "no-kill" not in script(work(run))


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/it's (1) $(false)/bin/python"])
def test_the_script_is_one_that_bash_can_read(run, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    assert python in shlex.split(next(line for line in script(work(run)).splitlines() if line.startswith("srun ")))
    subprocess.run(["bash", "-n"], input=script(work(run)), text=True, check=True)
    assert " -m cluster.agent --script '/a b.py' '3 4' &\n" in script(work(run))
    assert "TF_USE_LEGACY_KERAS" not in script(work(run))  # Keras 3, as everywhere
