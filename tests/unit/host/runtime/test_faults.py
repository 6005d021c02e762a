"""The means to hurt a task: signals to local processes, the engine's commands for containers, a full disk."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.runtime import compose_services, injector, registry
from cluster.host.runtime import local_runtime as local_faults
from cluster.host.runtime.compose_runtime import _HOG, ContainerFaults
from cluster.host.runtime.injector import FaultInjector
from cluster.host.runtime.local_runtime import ProcessFaults
from cluster.system import memory
from cluster.system.errors import ClusterError, UsageError
from cluster.system.json_files import write_json
from cluster.system.processes import identity
from tests.support.waiting import wait_for


@pytest.fixture
def run(make_run) -> RunFolder:
    return make_run(workers=1)


# Local processes


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


def test_a_signal_reaches_only_whom_it_is_meant_for(run, victims):
    injector = ProcessFaults(run)
    injector.signal("worker-0", signal.SIGKILL, "program")
    wait_for(lambda: states(victims)["program"] == "Z", "the program's end", timeout_s=10)
    assert states(victims)["agent"] in "SRD"
    injector.signal("worker-0", signal.SIGKILL, "agent", "program")  # the second is gone already
    wait_for(lambda: states(victims)["agent"] == "Z", "the agent's end", timeout_s=10)


def test_a_task_that_is_frozen_is_frozen_whole_until_it_is_relieved(run, victims):
    injector = ProcessFaults(run)
    injector.pause("worker-0")
    wait_for(lambda: set(states(victims).values()) == {"T"}, "the frozen task", timeout_s=10)
    injector.undo("worker-0")
    wait_for(lambda: set(states(victims).values()) == {"S"}, "the task that continues", timeout_s=10)


def test_a_lost_task_is_killed_whole_and_kept_away_until_it_is_undone(run, victims):
    injector = ProcessFaults(run)
    injector.lose("worker-0")
    wait_for(lambda: set(states(victims).values()) == {"Z"}, "the end of both", timeout_s=10)
    assert run.away("worker-0").exists()
    injector.undo("worker-0")
    assert not run.away("worker-0").exists()


def test_a_slow_program_stops_again_and_again_and_no_more_once_relieved(run, victims, monkeypatch):
    monkeypatch.setattr(local_faults, "SLICE_S", 0.1)
    injector = ProcessFaults(run)
    injector.slow("worker-0")
    for _ in range(2):
        for state in ("T", "S"):
            wait_for(lambda at=state: states(victims)["program"] == at, f"the state {state}", timeout_s=10)
    assert "S" == states(victims)["agent"]
    wait_for(lambda: states(victims)["program"] == "T", "the next stop", timeout_s=10)
    thread = injector._slowing
    injector.undo("worker-0")
    assert thread is not None and not thread.is_alive()
    wait_for(lambda: states(victims)["program"] == "S", "the program that continues", timeout_s=10)


def test_a_task_without_a_program_cannot_be_hurt_yet(run):
    with pytest.raises(UsageError, match=r"^worker-0 has no program yet: wait until it trains$"):
        ProcessFaults(run).signal("worker-0", signal.SIGKILL, "program")


# Containers


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
    """The injector of the run's runtime."""
    return registry.of(run).faults(run)


def test_the_means_are_those_of_the_runtime(make_run, run, docker):
    assert isinstance(registry.of(run).faults(run), ContainerFaults)
    other = make_run("another")
    assert isinstance(registry.of(other).faults(other), ProcessFaults)


def test_a_task_s_container_is_found_by_its_labels(run, faults, docker):
    faults.pause("worker-0")
    labels = (
        f"label=com.docker.compose.project={compose_services.project(run.path)}",
        "label=tf-cluster.task=worker-0",
    )
    assert {("ps", "--quiet", "--filter", labels[0], "--filter", labels[1])} == {
        words for words in docker.requested if words[0] == "ps"
    }


def test_a_task_whose_container_does_not_run_is_named(faults, docker):
    docker.answers["ps"] = (0, "")
    with pytest.raises(ClusterError, match=r"^worker-0 has no container that runs; `docker ps --all` shows"):
        faults.pause("worker-0")
    assert [] == docker.done()


def test_a_signal_is_sent_inside_the_container(faults, docker):
    faults.signal("worker-0", signal.SIGKILL, "agent", "program")
    faults.signal("worker-0", signal.SIGTERM, "agent")
    assert [
        ("exec", "c0ffee", "sh", "-c", "kill -9 1 7"),
        ("exec", "c0ffee", "sh", "-c", "kill -15 1"),
    ] == docker.done()


def test_a_signal_that_ends_its_own_container_is_no_error(faults, docker):
    docker.answers["exec"] = (137, "")
    faults.signal("worker-0", signal.SIGKILL, "agent")


@pytest.mark.parametrize(
    ("fault", "done", "undone"),
    [
        ("pause", ("pause",), ("unpause",)),
        ("lose", ("kill",), ("start",)),
        ("slow", ("update", "--cpus", "0.2"), ("update", "--cpus", str(os.cpu_count()))),
    ],
)
def test_a_container_has_a_fault_until_it_is_undone(faults, docker, fault, done, undone):
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


def test_a_container_that_is_cut_off_comes_back_under_its_own_name(faults, docker):
    docker.answers["inspect"] = (0, json.dumps({"run_egress": {}, "run_cluster": {}}))
    faults.partition("worker-0")
    inspect, disconnect = docker.done()
    assert ("inspect", "c0ffee") == (inspect[0], inspect[-1])
    assert ("network", "disconnect", "--force", "run_cluster", "c0ffee") == disconnect
    faults.undo("worker-0")
    assert [("network", "connect", "--alias", "worker-0", "run_cluster", "c0ffee")] == docker.done()


@pytest.mark.parametrize(("previous", "expected"), [(0, 2**30 + 2**27 + 5000), (2**33, 2**33)])
def test_a_container_without_memory_gets_its_own_back_or_plenty(faults, docker, monkeypatch, previous, expected):
    monkeypatch.setattr(memory, "available_bytes", lambda: 5000)
    docker.answers |= {"exec": (0, str(2**30)), "inspect": (0, str(previous))}
    faults.oom("worker-0")
    used, inspect, update, hog = docker.done()
    assert ("inspect", "--format", "{{.HostConfig.Memory}}", "c0ffee") == inspect
    assert ("exec", "c0ffee", "sh", "-c") == used[:4] and "memory.current" in used[4]
    limit = 2**30 + 2**27
    assert ("update", "--memory", str(limit), "--memory-swap", str(limit), "c0ffee") == update
    assert ("exec", "c0ffee", "python", "-c") == hog[:4]
    assert ("7", str(limit // 2**24 + 16)) == hog[5:]  # until the program is gone, and never more than fits
    faults.undo("worker-0")
    assert [("update", "--memory", str(expected), "--memory-swap", str(expected), "c0ffee")] == docker.done()


def test_the_hog_ends_with_the_program_that_it_starves():
    def starve(program: int, pieces: int) -> int:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))

        return subprocess.run(
            [sys.executable, "-c", _HOG, str(program), str(pieces)],
            preexec_fn=limit,
            stderr=subprocess.DEVNULL,
            timeout=300,
        ).returncode

    program = subprocess.Popen(["sleep", "60"])
    assert 0 == starve(program.pid, 2)  # it eats no more than it may
    assert 0 != starve(program.pid, 1000)  # but all of that
    program.kill()
    program.wait()
    assert 0 == starve(program.pid, 1000)


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
    line = str(failed.value)
    assert 1 == len(line.splitlines())
    assert line.startswith(f"docker {asks}") and line.endswith("Error response from daemon: no such thing")
    assert 1 == failed.value.exit_code
    docker.done()
    faults.undo("worker-0")
    assert [] == docker.done()


# The disk


@pytest.fixture
def unfillable(run, monkeypatch) -> RunFolder:
    """A run on whose disk nothing can be filled, whatever is decided."""
    monkeypatch.setattr(injector, "BALLAST", "absent/ballast")
    return run


REFUSED = r"^diskfull would fill \d+ GiB that other programs use; put RUNS_DIR on a small separate disk \(mount "


def test_the_disk_of_the_machine_itself_is_never_filled(unfillable, monkeypatch):
    monkeypatch.setattr(injector, "Path", lambda _: unfillable.path)  # where "/" is
    monkeypatch.setattr(injector, "MAX_BALLAST_BYTES", 2**70)
    with pytest.raises(UsageError, match=REFUSED) as refused:
        ProcessFaults(unfillable).diskfull("chief")
    assert 1 == len(str(refused.value).splitlines())


def test_a_disk_with_too_much_room_is_never_filled(unfillable, monkeypatch):
    monkeypatch.setattr(injector, "Path", lambda _: Path("/proc"))  # as if the runs had a separate disk
    monkeypatch.setattr(injector, "MAX_BALLAST_BYTES", 0)
    with pytest.raises(UsageError, match=REFUSED):
        ProcessFaults(unfillable).diskfull("chief")


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
