"""Processes: their ends in words, identities despite reused ids, and which end together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.system import processes
from cluster.system.processes import ProcessTable
from cluster.system.waiting import Bell
from tests.support.waiting import wait_for

SLEEP = ["sleep", "60"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that would live for a minute."""
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["sh", "-c", "echo yes; echo no >&2; exit 3"], (3, "yes\n", "no\n")),
        (["absent-program"], (127, "", "absent-program is not installed")),
        (["/"], (126, "", "/ may not be run by this user")),
        (["/bin/sleep", "60"], (124, "", "/bin/sleep did not answer in 0.2 s")),
        (["./garbage"], (126, "", "./garbage cannot be run: Exec format error")),
    ],
)
def test_a_program_that_gives_no_answer_is_reported_as_a_shell_would(command, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("garbage").write_bytes(b"\0")
    Path("garbage").chmod(0o755)
    assert answer == processes.run(command, 0.2 if "60" in command else 30)


@pytest.mark.parametrize("told_by_the_kernel", [True, False])
def test_a_child_s_end_is_waited_for(child, monkeypatch, told_by_the_kernel):
    if not told_by_the_kernel:
        monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=PermissionError))
    looks: list[None] = []
    look = child.poll
    monkeypatch.setattr(child, "poll", lambda: looks.append(None) or look())
    with pytest.raises(subprocess.TimeoutExpired):
        processes.wait(child, 0.05)
    assert 2 == len(looks) or not told_by_the_kernel  # an agent that waits costs its program nothing
    child.kill()
    assert -signal.SIGKILL == processes.wait(child, 30) == processes.wait(child)


def test_a_bell_ends_a_wait_once(child):
    bell, began = Bell(), time.monotonic()
    bell.ring()
    for timeout_s in (3600, 0.05):
        with pytest.raises(subprocess.TimeoutExpired):
            processes.wait(child, timeout_s, bell)
    assert 0.05 <= time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "exit code 137 (SIGKILL: killed)"),
        (137, "exit code 137 (SIGKILL: killed)"),
        (-11, "exit code 139 (SIGSEGV: crashed in native code)"),
        (-1, "exit code 129 (SIGHUP)"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_is_reported_in_words(code, message):
    assert message == processes.describe_exit(code)


def test_another_process_with_the_same_id_is_not_the_recorded_one(child):
    recorded = processes.identity(child.pid)
    for other in (recorded | {"start_ticks": recorded["start_ticks"] - 1}, None):
        assert not processes.alive(other)
        assert not processes.kill(other, signal.SIGKILL)
    assert child.poll() is None
    assert processes.alive(recorded)
    assert processes.kill(recorded, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still there as a zombie
    assert Path(f"/proc/{child.pid}").exists()
    assert not processes.alive(recorded)


def test_what_an_ended_child_left_in_its_group_is_killed():
    command = [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as leader:
        assert leader.stdout
        left = processes.identity(int(leader.stdout.readline()))
        assert processes.alive(left)
        assert 0 == processes.wait(leader)
    wait_for(lambda: not processes.alive(left), "the end of what it left")


def test_the_group_of_a_reaped_child_is_not_signalled(child, monkeypatch):
    """Its id may be another process's by now."""
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append((group, number)))
    processes.signal_group(child, signal.SIGTERM)
    child.kill()
    assert -signal.SIGKILL == processes.wait(child)
    assert [(child.pid, signal.SIGTERM), (child.pid, signal.SIGKILL)] == signalled
    processes.signal_group(child, signal.SIGKILL)
    assert 2 == len(signalled)


def test_a_signal_is_handled_once_there_is_a_handler(tmp_path):
    lines = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1)
open(sys.argv[1], "w").close()
time.sleep(60)
"""
    ready = tmp_path / "ready"
    with subprocess.Popen([sys.executable, "-c", lines, str(ready)]) as child:
        wait_for(ready.exists, "the handler")
        assert processes.handles(child.pid, signal.SIGUSR1)
        assert not processes.handles(child.pid, signal.SIGUSR2)
        child.kill()
    assert not processes.handles(child.pid, signal.SIGUSR1)


def test_a_process_that_was_stopped_is_distinguished_from_one_that_waits(child):
    assert processes.stopped_at(child.pid) is None
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: processes.stopped_at(child.pid) is not None, "the stop")
    child.send_signal(signal.SIGCONT)
    wait_for(lambda: processes.stopped_at(child.pid) is None, "the end of the stop")
    child.kill()
    assert processes.stopped_at(2**30) is None


def test_processes_are_found_by_their_environment(tmp_path):
    def found(value: str) -> list[int]:
        return sorted(ProcessTable().with_environment("RUN_DIR", value))

    with subprocess.Popen(SLEEP, env=os.environ | {"RUN_DIR": str(tmp_path)}) as child:
        wait_for(lambda: found(str(tmp_path)), "the child's environment")
        assert [child.pid] == found(str(tmp_path))
        assert [] == found(str(tmp_path)[:-1])
        child.kill()
