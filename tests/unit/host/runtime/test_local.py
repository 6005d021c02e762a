"""Local processes: free ports, a supervisor that leaves nothing behind; and the means to hurt a task."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.runtime import base, compose_runtime, registry, supervisor
from cluster.host.runtime.base import FaultInjector
from cluster.host.runtime.compose_runtime import MEMORY_EATER
from cluster.host.runtime.local_runtime import ProcessFaults
from cluster.system import ports
from cluster.system.errors import ClusterError, PrerequisiteError, TimedOut, UsageError
from cluster.system.files import ROOT
from cluster.system.json_files import read_json, write_json
from cluster.system.ports import free_ports
from cluster.system.processes import ProcessTable, identity
from tests.support.waiting import wait_for


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


def test_the_keeper_continues_a_supervisor_that_a_signal_stopped():
    stopped = """
import os, signal
from cluster.host.runtime import supervisor
supervisor.SUPERVISOR_STOPPED_S = 0.1
supervisor.keep(lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: None)
"""
    assert 0 == subprocess.run([sys.executable, "-c", stopped], cwd=ROOT, timeout=60, check=False).returncode


@pytest.mark.parametrize("end", ["exit 3", "kill -SEGV $$"])
def test_an_agent_that_keeps_failing_ends_the_run(run, monkeypatch, end):
    dies = {"command": ["sh", "-c", end], "environment": {}}
    write_json(run.compose, {"runtime": "local", "tasks": {"chief": dies}})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the supervisor runs in this very process
    supervisor.Supervisor(run).main()
    summary = read_json(run.summary)
    assert ("failed", "chief") == (summary["state"], summary["cause"]["task"])
    assert "its agent failed 4 times" in summary["cause"]["error"]


def test_an_agent_for_which_the_system_has_no_process_is_started_later(run, monkeypatch):
    fork, opened = os.fork, []

    def refused() -> int:
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
        if len(opened) < 3:
            raise OSError(supervisor.REFUSED[0], "no room")
        run.end("succeeded", task="chief")
        return fork()

    monkeypatch.setattr(supervisor, "RETRY_S", 0.1)
    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the supervisor runs in this very process
    chief = {"command": [sys.executable, "-c", "pass"], "environment": {}}
    write_json(run.compose, {"runtime": "local", "tasks": {"chief": chief}})
    supervisor.Supervisor(run).main()
    assert (3, 1, "succeeded") == (len(opened), len({*opened}), run.load_summary().state)


def test_a_supervisor_that_cannot_start_its_tasks_is_reported(run):
    run.compose.write_text("{}")
    with pytest.raises(TimedOut):
        supervisor.start_supervisor(run)


@pytest.mark.parametrize(("most", "attempts"), [(6, 7), (4, 5)])
def test_a_killed_agent_comes_back_without_its_children_up_to_a_limit(run, monkeypatch, tmp_path, most, attempts):
    script = f"sleep 99 & echo >>{tmp_path}/attempts; [ $(wc -l <{tmp_path}/attempts) -gt 6 ] && exit 3; kill -9 $$"
    chief = {"command": ["sh", "-c", script], "environment": {"OF": str(tmp_path)}}
    write_json(run.compose, {"runtime": "local", "tasks": {"chief": chief}})
    write_json(run.control / "started.json", {"time": 0.0, "max_restarts": 0, "max_external_restarts": most})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the supervisor runs in this very process
    supervisor.Supervisor(run).main()
    assert attempts == len((tmp_path / "attempts").read_text().splitlines())
    wait_for(lambda: not ProcessTable().with_environment("OF", str(tmp_path)), "the children's end", timeout_s=10)


# The means to hurt a task: signals to local processes, the engine's commands for containers, a full disk


@pytest.fixture
def victims(run) -> Iterator[dict[str, int]]:
    """Two processes that sleep, as the agent and the program of worker-0."""
    processes = {which: subprocess.Popen(["sleep", "60"]) for which in ("agent", "program")}
    write_json(run.programs("worker-0"), {which: identity(process.pid) for which, process in processes.items()})
    yield {which: process.pid for which, process in processes.items()}
    for process in processes.values():
        process.kill()
        process.wait()


def states(pids: dict[str, int]) -> dict[str, str]:
    return {which: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for which, pid in pids.items()}


def test_a_task_is_frozen_or_lost_whole_until_it_is_undone(run, victims):
    injector = ProcessFaults(run)
    injector.pause("worker-0")
    wait_for(lambda: set(states(victims).values()) == {"T"}, "the frozen task", timeout_s=10)
    injector.undo("worker-0")
    wait_for(lambda: set(states(victims).values()) == {"S"}, "the task that continues", timeout_s=10)
    injector.lose("worker-0")
    wait_for(lambda: set(states(victims).values()) == {"Z"}, "the end of both", timeout_s=10)
    assert run.away("worker-0").exists()
    injector.undo("worker-0")
    assert not run.away("worker-0").exists()
    with pytest.raises(UsageError):  # it has no program yet
        injector.signal("chief", signal.SIGKILL, "program")


class Engine:
    """Records what the engine is asked for and gives the answers that a test names by a word of the question."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, ...]] = []
        self.answers: dict[str, tuple[int, str]] = {"ps": (0, "c0ffee\nbadcafe")}

    def ask(self, *words: str, timeout_s: float = 10.0) -> tuple[int, str]:
        self.requested.append(words)
        return self.answers.get(words[0], (0, ""))

    def done(self) -> list[tuple[str, ...]]:
        """Return the questions since the last call, apart from the search for the container."""
        done = [words for words in self.requested if words[0] != "ps"]
        self.requested.clear()
        return done


@pytest.fixture
def docker(run, monkeypatch) -> Engine:
    """An engine in whose containers worker-0's agent is 1 and its program 7."""
    write_json(run.compose, {"x-runtime": "docker"})
    write_json(run.programs("worker-0"), {"agent": {"pid": 1}, "program": {"pid": 7}})
    made = Engine()
    monkeypatch.setattr(engine, "ask", made.ask)
    return made


@pytest.fixture
def faults(run, docker) -> FaultInjector:
    return registry.find_runtime(run).injector(run)


def test_a_signal_is_sent_inside_the_task_s_container(run, faults, docker):
    docker.answers["exec"] = (137, "")  # which may end with it
    faults.signal("worker-0", signal.SIGKILL, "agent", "program")
    project = f"label=com.docker.compose.project={compose_runtime.project(run.path)}"
    searched = ("ps", "--quiet", "--filter", project, "--filter", "label=tf-cluster.task=worker-0")
    assert searched in docker.requested
    assert [("exec", "c0ffee", "sh", "-c", "kill -9 1 7")] == docker.done()
    docker.answers["ps"] = (0, "")
    with pytest.raises(ClusterError, match="worker-0"):
        faults.pause("worker-0")
    assert [] == docker.done()


@pytest.mark.parametrize(
    ("fault", "done", "undone"),
    [
        ("pause", ("pause",), ("unpause",)),
        ("lose", ("kill",), ("start",)),
        ("slow", ("update", "--cpus", "0.2"), ("update", "--cpus", str(os.cpu_count()))),
        (
            "partition",
            ("network", "disconnect", "--force", "run_cluster"),
            ("network", "connect", "--alias", "worker-0", "run_cluster"),  # under its own name
        ),
    ],
)
def test_a_container_has_a_fault_until_it_is_undone(faults, docker, fault, done, undone):
    docker.answers["inspect"] = (0, json.dumps({"run_egress": {}, "run_cluster": {}}))
    getattr(faults, fault)("worker-0")
    assert (*done, "c0ffee") == docker.done()[-1]
    faults.undo("worker-0")
    assert [(*undone, "c0ffee")] == docker.done()


def test_a_busy_container_that_cannot_be_frozen_at_once_is_tried_again(faults, docker, monkeypatch):
    tries, ask = [], engine.ask

    def busy(*words: str, **options: float) -> tuple[int, str]:
        tries.extend(word for word in words if word == "pause")
        return (1, "unable to freeze") if "pause" in words and len(tries) < 3 else ask(*words, **options)

    monkeypatch.setattr(engine, "ask", busy)
    faults.pause("worker-0")
    assert 3 == len(tries)


def test_the_hog_eats_all_memory_and_ends_with_the_program_that_it_starves():
    def starve(program: int, pieces: int) -> int:
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n{MEMORY_EATER.read_text()}"
        command = [sys.executable, "-c", limited, str(program), str(pieces)]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=300).returncode

    with subprocess.Popen(["sleep", "60"]) as program:
        assert 0 == starve(program.pid, 2)  # it eats no more than it may
        assert 0 != starve(program.pid, 1000)  # but all of that
        program.kill()
    assert 0 == starve(program.pid, 1000)


def test_a_container_without_memory_gets_its_own_back(faults, docker):
    docker.answers |= {"exec": (0, str(2**30)), "inspect": (0, "8000000000")}
    faults.oom("worker-0")
    used, inspect, update, hog = docker.done()
    assert ("inspect", "--format", "{{.HostConfig.Memory}}", "c0ffee") == inspect
    assert ("exec", "c0ffee", "sh", "-c") == used[:4] and "memory.current" in used[4]
    limit = 2**30 + 2**27
    assert ("update", "--memory", str(limit), "--memory-swap", str(limit), "c0ffee") == update
    assert ("exec", "c0ffee", "python", "-c") == hog[:4]
    assert ("7", str(limit // 2**24 + 16)) == hog[5:]  # until the program is gone, and never more than fits
    faults.undo("worker-0")
    assert [("update", "--memory", "8000000000", "--memory-swap", "8000000000", "c0ffee")] == docker.done()


def test_what_was_done_last_is_undone_first_and_only_once(faults, docker):
    docker.answers["inspect"] = (0, json.dumps({"run_cluster": {}}))
    faults.partition("worker-0")
    faults.slow("worker-0")
    faults.pause("worker-0")
    docker.done()
    faults.undo("worker-0")
    assert ["unpause", "update", "network"] == [words[0] for words in docker.done()]
    faults.undo("worker-0")
    assert [] == docker.done()


@pytest.mark.parametrize(("does", "asks"), [("pause", "pause"), ("partition", "inspect"), ("slow", "update")])
def test_an_engine_that_refuses_is_reported_in_one_line_and_nothing_is_to_be_undone(faults, docker, does, asks):
    docker.answers[asks] = (1, "WARNING: a plugin is old\nError response from daemon: no such thing")
    with pytest.raises(ClusterError) as failed:
        getattr(faults, does)("worker-0")
    assert 1 == len(str(failed.value).splitlines())
    docker.done()
    faults.undo("worker-0")
    assert [] == docker.done()


@pytest.mark.parametrize(("root", "most"), [("", 2**70), ("/proc", 0)], ids=["the machine's own", "too much room"])
def test_a_disk_that_others_use_is_never_filled(run, monkeypatch, root, most):
    monkeypatch.setattr(base, "BALLAST", "absent/ballast")  # nothing can be filled, whatever is decided
    monkeypatch.setattr(base, "Path", lambda _: Path(root) if root else run.path)  # where "/" is
    monkeypatch.setattr(base, "MAX_BALLAST_BYTES", most)
    with pytest.raises(UsageError, match="RUNS_DIR"):
        ProcessFaults(run).check("diskfull", "chief")
    with pytest.raises(UsageError, match="RUNS_DIR"):
        ProcessFaults(run).diskfull("chief")


def room(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


def test_a_small_disk_is_filled_to_the_last_byte_and_given_back(mount_disk):
    small_disk = mount_disk("4m")
    run = RunFolder(small_disk / "run")
    run.create()
    write_json(run.programs("worker-0"), dict.fromkeys(("agent", "program"), identity(os.getpid())))
    before = room(small_disk)
    assert before > 3 * 2**20
    (small_disk / "last").write_bytes(b"x")
    injector = ProcessFaults(run)
    injector.diskfull("chief")
    assert 0 == room(small_disk)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "more").write_bytes(b"x")
    (small_disk / "more").unlink()
    injector.undo("worker-0")
    (small_disk / "last").unlink()
    assert before == room(small_disk)
    injector.undo("worker-0")  # there is nothing left to undo
