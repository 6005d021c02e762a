"""`up --debug TASK`: which tasks a debugger reaches, what is refused, and what the task gets."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.contract import spec
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.host.runtime import debugging
from cluster.host.runtime.compose_services import Containers, overlay
from cluster.system.errors import PrerequisiteError, UsageError
from tests.support.debug_client import free_port
from tests.support.launching import refusal

CLUSTER = spec.build(workers=1)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Have debugpy."""
    found = SimpleNamespace(origin="/packages/debugpy/__init__.py")
    monkeypatch.setattr(debugging.importlib.util, "find_spec", lambda name: found)


@pytest.mark.usefixtures("resolved")
def test_a_process_waits_on_this_machine_s_network_without_hang_detection():
    port = free_port()
    plan = planning.plan(Request(workers=1, debug=f"worker-0:{port}", runtime="local", tensorboard_port="0"))
    environments = {name: task["environment"] for name, task in plan.compose["tasks"].items()}
    assert f"127.0.0.1:{port}" == environments["worker-0"]["DEBUGPY_LISTEN"]
    assert "DEBUGPY_LISTEN" not in environments["chief"]
    assert ("host", 0) == (plan.network.name, plan.hang_timeout_s)
    assert any(f"worker-0 waits for a debugger on 127.0.0.1:{port}" in note for note in plan.notes)


def test_only_the_container_of_the_task_publishes_a_port_and_only_on_this_machine():
    waits = debugging.Debugger("worker-0", 5678, Path("/packages/debugpy"))
    containers = Containers(Path("/runs/r"), Path("/data"), "image", "1:1", 2**30, debugger=waits)
    made = overlay(CLUSTER, containers, [])
    task, chief = made["services"]["worker-0"], made["services"]["chief"]
    assert ["127.0.0.1:5678:5678"] == task["ports"]
    assert "0.0.0.0:5678" == task["environment"]["DEBUGPY_LISTEN"]
    assert {"net.ipv4.ip_default_ttl": 1} == task["sysctls"]  # nothing that it sends leaves this machine
    (mounted,) = (each for each in task["volumes"] if each["source"] == "/packages/debugpy")
    assert ("/debugger/debugpy", True) == (mounted["target"], mounted["read_only"])
    assert not {"ports", "networks", "sysctls"} & set(chief)
    assert {"cluster", "front"} == set(made["networks"])


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"debug": "worker-7"}, "worker-7"),
        ({"debug": "worker-0:80"}, "--debug"),
        ({"debug": "worker-0:x"}, "--debug"),
        ({"debug": "worker-0:{}", "detach": True}, "--detach"),
        ({"debug": "worker-0:{}", "network": "private"}, "--network private"),
        ({"debug": "worker-0:{}", "script": "s.py"}, "--debug"),
    ],
)
def test_what_keeps_a_debugger_away_is_refused(options, named, monkeypatch):
    monkeypatch.setattr("cluster.system.namespaces.refusal", lambda: None)
    options |= {"debug": options["debug"].format(free_port())}
    error = refusal(Request(**{"workers": 1, "runtime": "local", **options}))  # type: ignore[arg-type]
    assert isinstance(error, UsageError)
    assert named in str(error)


def test_a_taken_port_and_a_missing_debugpy_are_prerequisites(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PrerequisiteError, match="in use"):
        debugging.parse_debugger(f"chief:{taken.getsockname()[1]}", CLUSTER)
    monkeypatch.setattr(debugging.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrerequisiteError, match="debugpy"):
        debugging.parse_debugger(f"chief:{free_port()}", CLUSTER)


def test_tasks_that_a_scheduler_places_are_out_of_reach():
    waits = debugging.Debugger("chief", 5678, Path())
    with pytest.raises(UsageError, match="--runtime"):
        debugging.check_reachable(waits, remote="Slurm's tasks", private=False, detached=False)
