"""Which network a run's tasks get, who is warned of it, and what is kept of that."""

import json
import time

import pytest

from cluster.host.launch import manifest, planning, startup
from cluster.host.launch.plan import Plan
from cluster.host.options.request import Request
from cluster.host.runtime import network
from cluster.host.runtime.local import supervisor
from cluster.host.view.plan import plan_lines
from cluster.system import namespaces
from cluster.system.errors import EXIT_PREREQUISITE, EXIT_USAGE
from cluster.system.json_files import read_json, write_json
from cluster.system.namespaces import Refusal
from tests.support.launching import WORKING_ENGINE, Commands, refusal

LOCAL = {"runtime": "local", "tensorboard_port": "0"}
OPEN = "warning: TensorFlow's servers ask for no password, and whoever reaches this machine reaches them: the tasks "


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    """A machine that gives processes a network of their own."""
    monkeypatch.setattr(namespaces, "refusal", lambda: None)


@pytest.fixture
def forbidden(monkeypatch):
    """A machine that does not."""
    monkeypatch.setattr(namespaces, "refusal", lambda: Refusal("user.max_user_namespaces is 0", "root allows it"))


@pytest.fixture
def script(tmp_path) -> str:
    """A script of somebody's own."""
    path = tmp_path / "theirs" / "fit.py"
    path.parent.mkdir(mode=0o755)
    path.touch(0o644)
    return str(path)


def warnings(planned: Plan) -> list[str]:
    """Return what `up` prints of the network."""
    return [note for note in planned.notes if note.startswith("warning: ")]


def test_local_tasks_get_a_network_of_their_own(resolved):
    planned = planning.plan(Request(workers="1", **LOCAL))
    assert ("private", []) == (planned.network.name, warnings(planned))
    assert ("private", []) == (planned.to_json()["network"], planned.to_json()["notes"])
    assert "private" == planned.compose["network"]


def test_a_machine_that_gives_none_is_reported_in_one_line(resolved, forbidden):
    planned = planning.plan(Request(workers="2", **LOCAL))
    (message,) = warnings(planned)
    assert message == (
        f"{OPEN}are in this machine's network, they can have no network of their own: user.max_user_namespaces is 0; "
        "root allows it, or containers, or a firewall, close them"
    )
    assert ("host", [message]) == (planned.to_json()["network"], planned.to_json()["notes"])
    assert "host" == planned.compose["network"]
    assert [message] == [line for line in plan_lines(planned.to_json()) if "warning" in line]


def test_a_machine_that_gives_none_refuses_tasks_that_must_have_one(resolved, forbidden):
    error = refusal(Request(network="private", **LOCAL))
    assert EXIT_PREREQUISITE == error.exit_code
    assert str(error).startswith("--network private: tasks can have no network of their own here: user.max_user_n")
    assert str(error).endswith("root allows it, or leave it out")


def test_a_script_stays_in_the_machine_s_network_to_fetch_its_data(script):
    planned = planning.plan(Request(script=script, workers="1", **LOCAL))
    assert "host" == planned.network.name
    (message,) = warnings(planned)
    assert (
        message
        == f"{OPEN}are in this machine's network, where a script can fetch its data; --network private does without"
    )
    kept = planning.plan(Request(script=script, workers="1", network="private", **LOCAL))
    assert ("private", []) == (kept.network.name, warnings(kept))


def test_a_tpu_is_reached_through_the_machine_s_network(resolved, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    planned = planning.plan(Request(strategy="tpu", **LOCAL))
    assert ("host", []) == (planned.network.name, warnings(planned))


def test_the_machine_s_network_can_be_asked_for(resolved):
    planned = planning.plan(Request(workers="1", network="host", **LOCAL))
    (message,) = warnings(planned)
    assert ("host", True) == (planned.network.name, message.endswith("network, as requested (--network host)"))


@pytest.mark.parametrize("requested", ["", "host"])
def test_who_trains_alone_serves_nobody_and_is_not_warned(resolved, forbidden, requested):
    planned = planning.plan(Request(workers="0", network=requested, **LOCAL))
    assert ("host", []) == (planned.network.name, warnings(planned))


def test_containers_have_their_own(resolved, docker):
    docker(WORKING_ENGINE)
    planned = planning.plan(Request(workers="1"))
    assert ("docker", "private", []) == (planned.runtime.name, planned.network.name, warnings(planned))
    error = refusal(Request(network="host"))
    assert EXIT_USAGE == error.exit_code
    assert str(error).startswith("--network host with containers: theirs is their own; add --runtime local")


def test_a_network_that_is_none_is_refused_with_those_that_are(resolved):
    error = refusal(Request(network="pirvate", **LOCAL))
    assert EXIT_USAGE == error.exit_code
    assert "--network 'pirvate' is not a network here; did you mean 'private'?" == str(error)


def test_what_was_asked_for_holds_when_the_run_goes_on(resolved, monkeypatch):
    monkeypatch.setattr(supervisor, "start", lambda run: None)
    for name, requested, then in (("open", "host", "host"), ("closed", "private", "private"), ("left", "", "private")):
        planned = planning.plan(Request(name=name, network=requested, **LOCAL))
        startup.start(planned, Commands(), began=time.time())
        planned.run.end("stopped")
        write_json(planned.run.summary, {"state": "stopped"})
        assert (
            then
            == planning.plan(Request(resume=name, **LOCAL)).network.name
            == read_json(planned.run.compose)["network"]
        )
        assert then == planning.plan(Request(again=name, **LOCAL)).network.name
    assert "private" == planning.plan(Request(resume="open", network="private", **LOCAL)).network.name
    assert "host" == planning.plan(Request(resume="left", network="host", **LOCAL)).network.name


@pytest.mark.parametrize("requested", ["private", "host"])
def test_the_manifest_says_which_it_was_and_no_more(resolved, monkeypatch, requested):
    monkeypatch.setattr(supervisor, "start", lambda run: None)
    planned = planning.plan(Request(name="one", network=requested, **LOCAL))
    startup.start(planned, Commands(), began=time.time())
    found = manifest.read(planned.run)
    assert requested == found["network"]
    assert 1 == json.dumps(found).count('"network"')


@pytest.mark.parametrize(("inside", "interface"), [("private", "lo"), ("host", None)])
def test_gpus_of_several_tasks_meet_on_the_loopback(resolved, nvidia_smi, monkeypatch, inside, interface):
    nvidia_smi("8-h100-nvswitch")
    tasks = planning.plan(Request(workers="1", ps="1", gpus="2", network=inside, **LOCAL)).compose["tasks"]
    found = {name: task["environment"].get("NCCL_SOCKET_IFNAME") for name, task in tasks.items()}
    assert {"chief": interface, "worker-0": interface, "ps-0": None} == found


def test_the_doctor_says_whether_it_can_be_had():
    assert ("ok", "local tasks get one of their own") == (network.examine().state, network.examine().detail)
