"""A run's own network: nobody on this machine reaches its ports, its tasks reach each other and nothing else."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.host.runtime import namespaces, supervisor
from cluster.system.files import ROOT
from cluster.system.json_files import write_json
from tests.support import doors
from tests.support.gang import Gang
from tests.support.waiting import wait_for

SOMEBODY = 12345
"""A user who owns nothing."""

INTERFACES = "import socket\nprint([name for _, name in socket.if_nameindex()], flush=True)\n"

AS_SOMEBODY = """
import json, os, socket, sys
from cluster.host.runtime import namespaces
refused = namespaces.refusal()
if refused is None:
    namespaces.enter()
    open(sys.argv[1], "w").close()
names = [name for _, name in socket.if_nameindex()]
print(json.dumps({"refused": refused and refused.why, "user": os.getuid(), "interfaces": names}))
"""


@pytest.fixture
def private():
    """A machine that gives processes a separate network, as another program finds."""
    if refused := namespaces.refusal():
        words = ["unshare", *(["--user"] if os.getuid() else []), "--net", "true"]
        given = shutil.which("unshare") and subprocess.run(words, capture_output=True).returncode == 0
        assert not given, refused.why
        pytest.skip(refused.why)


def reached(gang: Gang) -> set[tuple[str, str]]:
    """Return at which of this machine's addresses which task's port answers."""
    tasks = gang.run.load_cluster().tasks
    return {(address, task.name) for address in doors.addresses() for task in tasks if doors.speaks(address, task.port)}


def network_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def as_user(user: int, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user, by a Python that this user may start."""
    other = {"user": user, "group": user, "extra_groups": []} if os.getuid() == 0 else {}
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            command = [python, "-B", "-c", program, *words]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **other)
            if "No module named 'cluster'" not in done.stderr:
                return done
    pytest.skip("no other user can start a Python here, or read this checkout")


def under_way(gang: Gang) -> Gang:
    for task in gang.run.load_cluster().tasks:
        gang.await_step(task.name, 2)
    return gang


def test_no_port_of_a_run_in_its_own_network_is_reached_from_this_machine(private, start_gang):
    gang = under_way(start_gang("train(4 if GENERATION else 2), work()", workers=1, network="private"))
    assert set() == reached(gang)
    assert {"chief", "worker-0"} == {event.task for event in gang.events("cluster complete")}
    before, killed = network_of(gang.pid("chief")), gang.pid("worker-0", "agent")
    os.kill(killed, 9)  # a task that comes back is in its run's network again
    wait_for(lambda: gang.pid("worker-0", "agent") != killed and gang.run.generation == 1, "the worker to come back")
    gang.await_step("worker-0", 4)
    assert {before} == {network_of(pid) for pid in supervisor.processes_left(gang.run)}
    assert before != network_of(os.getpid())
    gang.run.request_stop("a test")
    assert "stopped" == gang.summary()["state"]


def test_every_port_of_a_run_in_the_machine_s_network_is_reached_at_every_address(start_gang):
    """What the private network keeps out is reachable without it: the test before this one can fail."""
    gang = under_way(start_gang("train(2), work()", workers=1, network="host"))
    everywhere = {(address, task) for address in doors.addresses() for task in ("chief", "worker-0")}
    assert ("127.0.0.1", "chief") in everywhere
    wait_for(lambda: everywhere == reached(gang), "all ports to be open")


def test_two_runs_are_in_two_networks_with_a_loopback_alone(private, start_gang):
    gangs = [start_gang(f"{INTERFACES}work()", name=name, workers=0, network="private") for name in ("one", "other")]
    for gang in gangs:
        wait_for(lambda gang=gang: gang.beat("chief").state == "training", "the training")
        wait_for(lambda gang=gang: gang.run.log("chief").read_text().strip(), "its interfaces in the log")
        assert "['lo']" == gang.run.log("chief").read_text().strip()
    assert 2 == len({network_of(gang.pid("chief")) for gang in gangs})


def test_a_run_that_must_have_a_network_and_cannot_starts_no_task(run, monkeypatch, tmp_path):
    started = {"command": ["touch", str(tmp_path / "started")], "environment": {}}
    write_json(run.compose, {"runtime": "local", "network": "private", "tasks": {"chief": started}})
    monkeypatch.setattr(namespaces, "enter", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    with pytest.raises(PermissionError):
        supervisor.main(run)
    assert not (tmp_path / "started").exists()


def test_users_who_are_not_root_stay_who_they_are():
    user = os.getuid() or SOMEBODY
    with tempfile.TemporaryDirectory(prefix="tf-cluster-") as folder:  # pytest's own are closed to others
        Path(folder).chmod(0o777)
        done = as_user(user, AS_SOMEBODY, f"{folder}/written")
        assert 0 == done.returncode, done.stderr
        found = json.loads(done.stdout)
        if refused := found.pop("refused"):
            pytest.skip(refused)
        assert user == Path(folder, "written").stat().st_uid
    assert {"user": user, "interfaces": ["lo"]} == found


@pytest.mark.parametrize(
    ("setting", "value", "filtered", "why", "fix"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", False, "is 1", "_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", False, "is 0", "_clone=1"),
        ("user/max_user_namespaces", "0", False, "is 0", "max_user_namespaces=10000"),
        ("user/max_net_namespaces", "0", False, "is 0", "max_net_namespaces=10000"),
        ("user/max_user_namespaces", "96365", False, "No space left on device", "user_namespaces(7)"),
        ("user/max_user_namespaces", "96365", True, "filtered", ""),
    ],
)
def test_what_forbids_it_is_named_with_what_allows_it(tmp_path, monkeypatch, setting, value, filtered, why, fix):
    refused_with = OSError(errno.EPERM if filtered else errno.ENOSPC, "No space left on device")
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(f"{value}\n")
    monkeypatch.setattr(namespaces, "_SYSCTL", tmp_path)
    monkeypatch.setattr(namespaces, "_filtered", lambda: filtered)
    monkeypatch.setattr(namespaces, "enter", Mock(side_effect=refused_with))
    before = network_of(os.getpid())
    refused = namespaces.refusal()
    assert before == network_of(os.getpid())  # asking changes nothing here
    assert refused is not None
    assert why in refused.why
    assert fix in refused.fix


def test_a_loopback_that_is_not_there_is_a_refusal(tmp_path, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root enters a network without a user namespace")
    monkeypatch.setattr(namespaces, "_bring_up", lambda interface: None)
    monkeypatch.setattr(namespaces, "_SYSCTL", tmp_path)
    assert namespaces.refusal() is not None
