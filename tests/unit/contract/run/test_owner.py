"""What belongs to a run: daemons that hide are found, and what only looks like the run's is left alone."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import supervisor
from cluster.system import processes
from tests.support.gang import Gang
from tests.support.waiting import wait_for

DAEMON = """
import subprocess
pid_file = run.path / "daemon"
subprocess.Popen(
    ["env", "-i", "setsid", "--fork", "sh", "-c", 'echo $$ >"$0.new"; mv "$0.new" "$0"; exec sleep 600', str(pid_file)],
    env={"PATH": os.environ["PATH"]},
)
"""
"""A daemon outside the run's process tree, in a new session, with an empty environment."""


def daemon_of(gang: Gang) -> dict[str, int]:
    """Wait for the daemon that a task began; return its identity."""
    pid_file = gang.run.path / "daemon"
    wait_for(pid_file.exists, "the daemon")
    found = processes.identity(int(pid_file.read_text()))
    assert processes.alive(found)
    return found


def test_a_daemon_that_hides_is_killed_with_its_run(start_gang):
    gang = start_gang(f"{DAEMON}\nwork()", workers=0)
    daemon = daemon_of(gang)
    assert daemon["pid"] in supervisor.processes_left(gang.run)
    supervisor.kill_run(gang.run)
    assert not processes.alive(daemon)


def test_a_daemon_that_hides_ends_when_the_supervisor_is_killed(start_gang):
    gang = start_gang(f"{DAEMON}\nwork()", workers=0)
    daemon = daemon_of(gang)
    keeper = gang.keeper["pid"]
    children = map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
    (pid,) = (child for child in children if child != daemon["pid"])
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes.alive(daemon), "the daemon's end", timeout_s=300)
    wait_for(lambda: not supervisor.is_running(gang.run), "the keeper's end", timeout_s=300)


def test_what_outlives_a_killed_keeper_is_known_by_its_environment(start_gang):
    lines = """
    import subprocess
    child = subprocess.Popen(["setsid", "sleep", "600"])
    (run.path / "daemon.new").write_text(str(child.pid))
    (run.path / "daemon.new").rename(run.path / "daemon")
    work()
    """
    gang = start_gang("\n".join(line.strip() for line in lines.splitlines()), workers=0)
    child = daemon_of(gang)
    processes.kill(gang.keeper, signal.SIGKILL)
    wait_for(lambda: [child["pid"]] == supervisor.processes_left(gang.run), "the end of all others", timeout_s=300)
    assert 1 == supervisor.kill_run(gang.run)
    assert not processes.alive(child)


def test_a_run_is_found_through_a_link_and_a_shell_that_knows_its_folder_left_alone(start_gang, tmp_path):
    gang = start_gang("train(2), work()", workers=0)
    (tmp_path / "link").symlink_to(gang.run.path.parent)
    linked = RunFolder(tmp_path / "link" / gang.run.name)
    environment = os.environ | {"RUN_DIR": str(gang.run.path), "RUNS_DIR": str(gang.run.path.parent), "TASK": "chief"}
    with subprocess.Popen(["sleep", "600"], env=environment) as shell:
        gang.await_step("chief", 2)
        assert supervisor.processes_left(gang.run) == supervisor.processes_left(linked)
        assert 4 == supervisor.kill_run(linked)
        assert shell.poll() is None
        shell.kill()


@pytest.mark.parametrize(
    "record",
    [
        *("", "[]", "x", '{"runtime": "local"}', '{"runtime": 5, "token": "t"}'),
        json.dumps({"runtime": "local", "token": "", "supervisor": {"pid": 1, "start_ticks": 1}}),
        json.dumps({"runtime": "local", "token": 7, "supervisor": None}),
        *(
            json.dumps({"runtime": "local", "token": "t", "supervisor": process})
            for process in ({"pid": 1}, {"pid": "1", "start_ticks": 1}, {"pid": 1, "start_ticks": None}, 1)
        ),
    ],
)
def test_a_damaged_record_owns_nothing(run, record):
    run.outside(owner.RECORD).parent.mkdir(exist_ok=True)
    run.outside(owner.RECORD).write_text(record)
    assert not supervisor.is_running(run)
    assert [] == supervisor.processes_left(run)
    assert 0 == supervisor.kill_run(run)
