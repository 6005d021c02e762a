"""Which network a run's tasks get, who is warned of it, and what is kept of that."""

import pytest

from cluster.host.launch import planning
from cluster.host.launch.plan import Plan, plan_lines
from cluster.host.options.request import Request
from cluster.host.runtime import namespaces
from cluster.host.runtime.namespaces import Refusal
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE
from cluster.system.json_files import read_json
from tests.support.launching import WORKING_ENGINE, refusal

LOCAL = {"runtime": "local", "tensorboard_port": "0"}


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setattr(namespaces, "refusal", lambda: None)


def warnings(planned: Plan) -> list[str]:
    return [note for note in planned.notes if note.startswith("warning: ")]


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize(
    ("requested", "is_allowed", "expected", "warned"),
    [
        ({"workers": 1}, True, "private", False),
        ({"workers": 2}, False, "host", True),
        ({"workers": 1, "network": "host"}, True, "host", True),
        ({"workers": 1, "script": "theirs/fit.py"}, True, "host", True),  # where it can fetch its data
        ({"workers": 1, "script": "theirs/fit.py", "network": "private"}, True, "private", False),
        ({"strategy": "tpu"}, True, "host", False),  # a TPU is reached through it
        ({"workers": 0}, False, "host", False),  # a task that trains alone serves nobody
        ({"workers": 0, "network": "host"}, False, "host", False),
    ],
)
def test_local_tasks_have_a_private_network_unless_it_is_impossible_or_useless(
    monkeypatch, tmp_path, theirs, requested, is_allowed, expected, warned
):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    monkeypatch.chdir(tmp_path)
    if not is_allowed:
        monkeypatch.setattr(namespaces, "refusal", lambda: Refusal("forbidden", "root allows it"))
    planned = planning.plan(Request(**requested, **LOCAL))
    assert expected == planned.network.name == planned.to_json()["network"] == planned.compose["network"]
    messages = warnings(planned)
    assert warned == (len(messages) == 1)
    assert messages == [line for line in plan_lines(planned.to_json()) if "warning" in line]


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize(("name", "code"), [("private", EXIT_PREREQUISITE), ("pirvate", EXIT_USAGE)])
def test_a_network_that_cannot_be_is_refused(monkeypatch, name, code):
    monkeypatch.setattr(namespaces, "refusal", lambda: Refusal("forbidden", "root allows it"))
    error = refusal(Request(network=name, **LOCAL))
    assert code == error.exit_code
    assert "--network" in str(error)


def test_containers_have_their_own(resolved, docker):
    docker(WORKING_ENGINE)
    planned = planning.plan(Request(workers=1))
    assert ("docker", "private", []) == (planned.runtime.name, planned.network.name, warnings(planned))
    error = refusal(Request(network="host"))
    assert (EXIT_USAGE, True) == (error.exit_code, "--network host" in str(error))


def test_a_requested_network_is_kept_when_the_run_continues(resolved, stopped_run):
    for name, requested, then in (("open", "host", "host"), ("closed", "private", "private"), ("left", "", "private")):
        assert then == read_json(stopped_run(name=name, network=requested).compose)["network"]
        for again in (Request(resume=name, **LOCAL), Request(again=name, **LOCAL)):
            assert then == planning.plan(again).network.name
    assert "private" == planning.plan(Request(resume="open", network="private", **LOCAL)).network.name
    assert "host" == planning.plan(Request(resume="left", network="host", **LOCAL)).network.name


@pytest.mark.parametrize(("inside", "interface"), [("private", "lo"), ("host", None)])
def test_gpus_of_several_tasks_meet_on_the_loopback(resolved, nvidia_smi, monkeypatch, inside, interface):
    nvidia_smi("8-h100-nvswitch")
    tasks = planning.plan(Request(workers=1, ps=1, gpus="2", network=inside, **LOCAL)).compose["tasks"]
    found = {name: task["environment"].get("NCCL_SOCKET_IFNAME") for name, task in tasks.items()}
    assert {"chief": interface, "worker-0": interface, "ps-0": None} == found
