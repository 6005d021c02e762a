"""Local processes: free ports, the plan of processes, and a supervisor that leaves nothing behind."""

import signal
import socket
import subprocess
import sys

import pytest

from cluster.host.runtime import supervisor
from cluster.system import ports
from cluster.system.errors import PrerequisiteError, TimedOut
from cluster.system.json_files import read_json, write_json
from cluster.system.paths import ROOT
from cluster.system.ports import free_ports


def test_free_ports_are_free_and_different(monkeypatch):
    found = free_ports(20)
    assert 20 == len(set(found))
    for port in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
    monkeypatch.setattr(ports, "PORTS", range(found[0], found[0] + 1))
    assert found[:1] == free_ports(1)
    with pytest.raises(PrerequisiteError):
        free_ports(2)
    with socket.create_server(("127.0.0.1", found[0])), pytest.raises(PrerequisiteError):
        free_ports(1)


def test_killing_a_run_leaves_no_process(start_gang):
    gang = start_gang("train(2), work()", workers=1)
    other = start_gang("train(2), work()", name="other", workers=0)
    for started, tasks in ((gang, ("chief", "worker-0")), (other, ("chief",))):
        for task in tasks:
            started.await_step(task, 2)
    assert 6 == len(supervisor.processes_left(gang.run))  # two for all of them, two agents and their programs
    assert 6 == supervisor.kill_run(gang.run)
    assert [] == supervisor.processes_left(gang.run)
    assert 4 == len(supervisor.processes_left(other.run))


def test_the_keeper_continues_a_supervisor_that_a_signal_stopped():
    stopped = """
import os, signal
from cluster.host.runtime import supervisor
supervisor.SUPERVISOR_STOPPED_S = 0.1
supervisor.keep(lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: None)
"""
    assert 0 == subprocess.run([sys.executable, "-c", stopped], cwd=ROOT, timeout=60, check=False).returncode


@pytest.mark.parametrize("end", ["exit 3", "kill -SEGV $$"])
def test_an_agent_that_keeps_failing_ends_the_run(make_run, monkeypatch, end):
    run = make_run(workers=0)
    dies = {"command": ["sh", "-c", end], "environment": {}}
    write_json(run.compose, {"runtime": "local", "tasks": {"chief": dies}})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the supervisor runs in this very process
    supervisor.Supervisor(run).main()
    summary = read_json(run.summary)
    assert ("failed", "chief") == (summary["state"], summary["cause"]["task"])
    assert "its agent failed 4 times" in summary["cause"]["error"]


def test_a_supervisor_that_cannot_start_its_tasks_is_reported(make_run):
    run = make_run(workers=0)
    run.compose.write_text("{}")
    with pytest.raises(TimedOut):
        supervisor.start_supervisor(run)


@pytest.mark.parametrize(("most", "attempts"), [(6, 7), (4, 5)])
def test_an_agent_that_is_killed_comes_back_up_to_a_limit(make_run, monkeypatch, tmp_path, most, attempts):
    run = make_run(workers=0)
    script = f"echo >>{tmp_path}/attempts; [ $(wc -l <{tmp_path}/attempts) -gt 6 ] && exit 3; kill -9 $$"
    chief = {"command": ["sh", "-c", script], "environment": {}}
    write_json(run.compose, {"runtime": "local", "tasks": {"chief": chief}})
    write_json(run.control / "started.json", {"time": 0.0, "max_restarts": 0, "max_external_restarts": most})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the supervisor runs in this very process
    supervisor.Supervisor(run).main()
    assert attempts == len((tmp_path / "attempts").read_text().splitlines())
