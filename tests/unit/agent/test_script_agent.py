"""Scripts that know nothing of agents: how each end is read, and what a script finds around itself."""

import json
import os
import signal
import textwrap
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.agent import agent, attempt, decide, task_process
from cluster.agent.decide import STOP_RUN, EndRun, Phase
from cluster.agent.run_view import RunView
from cluster.contract.recovery import ends
from cluster.contract.run.records import OutcomeState
from cluster.host.launch.user_files import lay_out
from cluster.host.runtime import supervisor
from cluster.host.runtime.local_runtime import processes_of
from cluster.host.runtime.payload import Payload
from cluster.host.view.status import ended_lines
from cluster.system.json_files import append_json, read_json, write_json
from tests.support.beats import beat
from tests.support.gang import SIGKILLED, Gang, StartGang, assert_ended
from tests.support.waiting import wait_for

LINES = """
import json, os, pathlib, signal, sys, time

NAME, GENERATION = os.environ["TASK"], int(os.environ["GENERATION"])
RUN = pathlib.Path(os.environ["RUN_DIR"])


def until(condition):
    while not condition():
        time.sleep(0.01)


def beat(task):
    return json.loads((RUN / "status" / f"{task}.json").read_text())


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
"""


@pytest.fixture
def start_scripts(make_run, start_run, tmp_path) -> StartGang:
    """Starts a cluster whose every task runs these lines; takes the script's arguments and `spec.build`'s options."""

    def start(lines: str, arguments: tuple[str, ...] = (), absent: tuple[str, ...] = (), **topology: Any) -> Gang:
        script = tmp_path / "theirs" / "script.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(LINES + textwrap.dedent(lines))
        run, payload = make_run(**topology), Payload(script, arguments)
        cluster = run.load_cluster()
        write_json(run.config, payload.to_json())
        more = payload.environment(cluster, payload.local_path())
        how = processes_of(cluster, run.path, tmp_path / "data", payload.command(), more)
        how |= {"tasks": {name: task for name, task in how["tasks"].items() if name not in absent}}
        write_json(run.compose, how)
        lay_out(payload.script, run, cluster, payload.script.parent)
        return start_run(run)

    return start


def test_a_run_succeeds_when_every_script_ended_with_0(start_scripts):
    # The chief is done first: the others continue for as long as they like.
    gang = start_scripts("if NAME != 'chief': until(lambda: beat('chief')['state'] == 'done')", workers=2)
    assert_ended(gang.summary(), state="succeeded", replicas=3, tasks={"chief": 0, "worker-0": 0, "worker-1": 0})
    assert {("done", 0)} == {(beat.state, beat.exit_code) for beat in gang.run.heartbeats().values()}
    line, *rest = ended_lines(gang.run)
    assert line.startswith("succeeded: every task's script ended with 0 in ")
    assert any(line.startswith("its files ") and line.endswith("/runs/run/work/TASK") for line in rest)


def test_a_killed_worker_under_ps_starts_again_alone(start_scripts):
    lines = """
    if NAME == 'worker-0' and os.environ['RESTARTS'] == '0': die()
    if NAME != 'chief': until(lambda: False)
    until(lambda: beat('worker-0')['restarts'] and beat('worker-0')['state'] == 'training')
    """
    gang = start_scripts(lines, workers=2, ps=1)
    summary = gang.summary()
    assert ("succeeded", 0) == (summary["state"], gang.run.generation)
    (restart,) = summary["restarts"]
    assert ("worker-0", SIGKILLED) == (restart["task"], restart["cause"])
    assert (None, None) == (restart["steps_lost"], restart["resumed_s"])
    assert restart["script_started_s"] > 0


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize(("age_s", "shortly"), [(5.0, True), (500.0, False)])
def test_whether_a_worker_restarted_shortly_before_is_measured_by_its_own_clock(make_run, skew_s, age_s, shortly):
    run = make_run(workers=1, ps=1)
    chief = agent.Agent(RunView(run), "chief", [], 1.0, kind=task_process.Script)
    now = time.time() + skew_s
    restarted = {"task": "worker-0", "event": "restarted", "generation": 0, "time": now - age_s, "detail": {}}
    append_json(run.events_log, restarted)
    write_json(run.status("worker-0"), {"task": "worker-0", "state": "training", "updated_at": now})
    assert shortly is chief._attempt_in(0)._worker_restarted()


def test_a_killed_task_is_known_before_a_network_file_system_lists_its_end(run, monkeypatch):
    """Otherwise the error of a script that lost contact with it ends the run (schedule 8087954)."""
    ends.record_end(run, 0, ends.End("chief", ends.EXTERNAL, SIGKILLED, None, time.time()))
    write_json(run.status("chief"), {"task": "chief", "state": "failed", "generation": 0, "updated_at": time.time()})
    monkeypatch.setattr(ends, "recorded_ends", lambda run, generation: [])
    worker = agent.Agent(RunView(run), "worker-0", [], 1.0, kind=task_process.Script)._attempt_in(0)
    assert worker._another_died()


@pytest.mark.parametrize(("worker", "action"), [("done", EndRun(OutcomeState.SUCCEEDED)), ("stopped", STOP_RUN)])
def test_a_stop_that_only_another_host_sees_is_not_a_success(run, worker, action):
    chief = agent.Agent(RunView(run), "chief", [], 1.0, kind=task_process.Script)._attempt_in(0)
    for task, state in (("chief", "done"), ("worker-0", worker)):
        write_json(run.status(task), {"task": task, "state": state, "generation": 0, "updated_at": time.time()})
    chief.begin(Phase.DONE)
    assert action == decide.decide(chief.observe())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_sigterm", "grace_s"),
    [("signal.SIG_DFL", "10"), ("lambda *_: sys.exit('saved')", "10"), ("signal.SIG_IGN", "0.2")],
)
def test_a_stop_ends_every_script(start_scripts, monkeypatch, on_sigterm, grace_s):
    monkeypatch.setenv("SCRIPT_GRACE_S", grace_s)
    gang = start_scripts(f"signal.signal(signal.SIGTERM, {on_sigterm})\nprint('on')\nuntil(lambda: False)", workers=1)
    wait_for(lambda: all("on" in gang.run.log(t).read_text() for t in ("chief", "worker-0")), "both scripts")
    gang.run.request_stop("a test")
    summary = gang.summary()
    assert ("stopped", []) == (summary["state"], summary["restarts"])
    assert {"stopped"} == {beat.state for beat in gang.run.heartbeats().values()}


def test_the_end_of_one_script_does_not_cut_the_grace_period_of_another(run, monkeypatch):
    monkeypatch.setattr(attempt, "SCRIPT_GRACE_S", 100.0)
    monkeypatch.setattr(attempt.time, "monotonic", lambda: 1000.0)
    worker = agent.Agent(RunView(run), "worker-0", [], 1.0, kind=task_process.Script)._attempt_in(0)
    worker.program = SimpleNamespace(request_end=lambda: None)
    worker.request_end()
    run.end("stopped", task="chief")
    monkeypatch.setattr(attempt.time, "monotonic", lambda: 1030.0)
    beat(run, "worker-0")
    assert 70.0 == worker.grace_s


def test_a_script_gets_its_arguments_its_environment_and_its_neighbours(start_scripts, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "train.py").write_text("ORIGIN = 'theirs'\n")  # this checkout has a package of that name
    (folder / "cluster.py").write_text("ORIGIN = 'theirs'\n")
    (folder / "data").mkdir()
    (folder / "data" / "table.csv").write_text("1,2\n")
    lines = """
    import cluster, train
    pathlib.Path("out.json").write_text(json.dumps({
        "arguments": sys.argv[1:], "origins": [cluster.ORIGIN, train.ORIGIN], "path": sys.path[0],
        "table": open("data/table.csv").read(), "cwd": os.getcwd(), "environment": dict(os.environ),
        "agent": pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_text(),
    }))
    """
    gang = start_scripts(lines, ("--batch", "two words", "$HOME"), workers=1)
    assert "succeeded" == gang.summary()["state"]
    for task, role in (("chief", "chief"), ("worker-0", "worker")):
        found = json.loads((gang.run.work(task) / "out.json").read_text())
        assert ["--batch", "two words", "$HOME"] == found["arguments"]
        assert (["theirs", "theirs"], str(folder)) == (found["origins"], found["path"])
        assert ("1,2\n", str(gang.run.work(task))) == (found["table"], found["cwd"])
        environment = found["environment"]
        assert (str(gang.run.path), str(tmp_path / "data")) == (environment["RUN_DIR"], environment["DATA_DIR"])
        assert (task, "1") == tuple(environment[k] for k in ("TASK", "PYTHONUNBUFFERED"))
        assert role == json.loads(environment["TF_CONFIG"])["task"]["type"]
        assert "GATE_FD" not in environment
        assert "supervisor" in found["agent"]  # a fork of it, which imports nothing
    assert not (folder / "out.json").exists()


def test_this_checkout_is_taken_off_a_script_s_path(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    path = os.pathsep.join(["/theirs", str(task_process.ROOT), "", "/more"])
    hook = str(task_process.KERAS_HOOK)
    expected = {"PYTHONPATH": f"{hook}:/theirs:/more", "A": "b"}
    assert expected == task_process.script_environment({"PYTHONPATH": path, "A": "b"})
    assert {"PYTHONPATH": hook} == task_process.script_environment({"PYTHONPATH": str(task_process.ROOT)})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert "4" == task_process.script_environment({})["TF_NUM_INTEROP_THREADS"]


def test_a_script_starts_only_when_its_cluster_is_complete(start_scripts, monkeypatch):
    monkeypatch.setenv("RENDEZVOUS_TIMEOUT_S", "1")
    gang = start_scripts("print('on')", absent=("worker-0",), workers=1)
    outcome = gang.outcome()
    assert ("failed", 4) == (outcome.state, outcome.exit_code)
    assert "missing worker-0" in outcome.error
    assert "never started" in outcome.error
    assert "" == gang.run.log("chief").read_text()


@pytest.mark.extended
def test_each_script_has_its_own_temporary_folder_which_survives_kills_until_the_run_ends(
    start_scripts, temporary_files
):
    lines = """
    import tempfile
    mark = pathlib.Path(tempfile.gettempdir(), "mark")
    found = mark.read_text() if mark.exists() else "-"
    mark.write_text(NAME)  # first: the test kills a script that has reported
    with open(RUN / "marks", "a") as file:
        print(NAME, GENERATION, mark, found, file=file)
    until(lambda: GENERATION == 2)
    """
    gang = start_scripts(lines, workers=1)
    for generation, victim in enumerate(("program", "agent")):
        wait_for(lambda count=2 * generation + 2: len(marks(gang)) == count, "both scripts")
        of = gang.run.programs("worker-0")
        os.kill(wait_for(lambda of=of: read_json(of, None), "the record")[victim]["pid"], signal.SIGKILL)
    gang.summary()
    assert [("chief", "-"), ("worker-0", "-"), *(2 * [("chief", "chief"), ("worker-0", "worker-0")])] == [
        (name, found) for name, _, _, found in sorted(marks(gang), key=lambda mark: (mark[1], mark[0]))
    ]
    assert {2} == {len({path for task, _, path, _ in marks(gang)})}
    assert [] == list(temporary_files.iterdir())


def marks(gang: Gang) -> list[list[str]]:
    """Return the lines of the scripts of the test above: task, generation, path and the content found there."""
    path = gang.run.path / "marks"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_whose_every_process_was_killed_leaves_no_temporary_files(start_scripts, temporary_files):
    gang = start_scripts("until(lambda: False)", workers=1)
    wait_for(gang.run.programs("worker-0").exists, "the script of worker-0", timeout_s=300)
    assert [] != list(temporary_files.iterdir())
    supervisor.kill_run(gang.run)
    assert [] == list(temporary_files.iterdir())
