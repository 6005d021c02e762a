"""Clusters in containers: no privilege, no open port, nothing left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.image import engine
from cluster.host.runtime import compose_runtime, namespaces, tensorboard
from cluster.system.ports import free_ports
from tests.e2e.scenario import ENDLESS, TRAIN_IMAGE, step_of, summary
from tests.support import doors
from tests.support.waiting import await_shown, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("require_engine", "images")]


@pytest.fixture(scope="module")
def port() -> int:
    """A free port for TensorBoard."""
    return free_ports(1)[0]


SECRET = "precious words"
LAZY = """
import os
import time

from tensorflow import keras


class Pauses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.3)


def callbacks(run_dir, task):
    print("a key of", len(os.environ["A_KEY"].split()), "words")
    return [Pauses()]
"""
"""Callbacks that slow the training down, to leave the processor to the tests."""


@pytest.fixture(scope="module")
def training(clusters, port, tmp_path_factory) -> Iterator[RunFolder]:
    """A chief and a worker in containers that train for longer than the tests take."""
    (folder := tmp_path_factory.mktemp("theirs") / "lazy").mkdir(mode=0o755)
    (folder / "key").write_text(f"{SECRET}\n")
    (folder / "key").chmod(0o644)
    theirs = clusters.with_modules(folder, lazy=LAZY)
    words = (f"--secret=A_KEY={folder / 'key'}", "--workers=1", "--detach")
    words = (*words, "--", *ENDLESS, "--callbacks=lazy:callbacks")
    yield theirs.up("contained", *words, runtime="docker", port=port, timeout_s=400)
    clusters.invoke("down")


def containers(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the engine's description of a run's containers, by task."""
    label = f"label=com.docker.compose.project={compose_runtime.project(run.path)}"
    _, ids = engine.ask("ps", "--all", "--quiet", "--filter", label)
    if not ids:
        return {}
    _, text = engine.ask("inspect", *ids.split())
    return {each["Config"]["Labels"]["tf-cluster.task"]: each for each in json.loads(text)}


@pytest.mark.parametrize("task", ["chief", "worker-0"])
def test_a_task_must_hold_no_privilege(training, task):
    found = containers(training)[task]
    host = found["HostConfig"]
    assert found["Config"]["User"] == compose_runtime.task_user()
    assert not found["Config"]["User"].startswith("0:")
    assert host["ReadonlyRootfs"] is True
    assert ["ALL"] == host["CapDrop"]
    assert not host["CapAdd"]
    assert ["no-new-privileges:true"] == host["SecurityOpt"]  # so the seccomp profile is the engine's own
    assert 4096 == host["PidsLimit"]
    assert 0 < host["Memory"] == host["MemorySwap"]
    assert host["Privileged"] is False
    assert not host["PortBindings"]
    assert {"max-size": "10m", "max-file": "3"} == host["LogConfig"]["Config"]
    assert host["Init"] is True
    assert {"/runs/contained"} == {mount["Destination"] for mount in found["Mounts"] if mount["RW"]}


@pytest.mark.parametrize("task", ["chief", "worker-0"])
def test_a_secret_must_be_known_to_a_task_and_shown_nowhere(training, task):
    log = training.log(task)
    wait_for(lambda: log.exists() and "a key of 2 words" in log.read_text(), f"the secret to be known to {task}")
    assert SECRET not in json.dumps(containers(training)[task])
    written = [*training.path.glob("*.json*"), *training.path.glob("logs/*.log")]  # files that stay
    assert {training.compose, training.log(task)} <= {*written}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_a_task_must_become_healthy(training):
    wait_for(
        lambda: {each["State"]["Health"]["Status"] for each in containers(training).values()} == {"healthy"},
        "every container to be healthy",
    )


@pytest.fixture(scope="module")
def another_network() -> Iterator[str]:
    """An unrelated network of containers."""
    name = f"tf-cluster-test-{os.getpid()}"
    assert 0 == engine.ask("network", "create", name)[0]
    yield name
    engine.ask("network", "rm", name)


@pytest.fixture(scope="module")
def ports(training) -> list[tuple[str, int]]:
    """The address and port of every task's TensorFlow server, all of which answer in the network of the run."""
    found = [
        (network["IPAddress"], spec.TASK_PORT)
        for container in containers(training).values()
        for network in container["NetworkSettings"]["Networks"].values()
    ]
    assert 2 == len(set(found))
    (own,) = containers(training)["chief"]["NetworkSettings"]["Networks"]
    wait_for(lambda: found == reached(own, found), "every server to be reached by a container in the run's network")
    return found


def reached(network: str, ports: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the ports that another container, in this network, can reach."""
    words = [str(word) for port in ports for word in port]
    run = ("run", "--rm", f"--network={network}", "--entrypoint=python", TRAIN_IMAGE)
    code, text = engine.ask(*run, "-c", Path(doors.__file__).read_text(), *words, timeout_s=60)
    assert 0 == code, text
    return [(line.split()[0], int(line.split()[1])) for line in text.splitlines()]


def test_no_port_must_be_reached_from_the_engine_s_default_network_or_another_one(ports, another_network):
    for network in ("bridge", another_network):
        assert [] == reached(network, ports), network


def test_no_port_must_be_reached_from_the_host(ports):
    here = [(address, spec.TASK_PORT) for address in doors.addresses()]
    assert ("127.0.0.1", spec.TASK_PORT) in here
    assert [] == [port for port in [*ports, *here] if doors.speaks(*port)]


def test_local_tasks_in_a_container_must_get_the_reason_why_they_have_no_private_network():
    program = Path(namespaces.__file__).read_text() + "\nprint(refusal().why)"
    run = ("run", "--rm", "--network=none", "--entrypoint=python", TRAIN_IMAGE)
    assert (0, "system calls are filtered") == engine.ask(*run, "-c", program, timeout_s=60)


def test_tensorboard_must_show_the_run_on_loopback_only(training, port):
    _, ids = engine.ask("ps", "--quiet", "--filter", f"publish={port}")
    _, text = engine.ask("inspect", ids)
    bindings = json.loads(text)[0]["HostConfig"]["PortBindings"]
    assert {"6006/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]} == bindings
    await_shown(port, "contained/chief")


@pytest.fixture
def neighbour() -> Iterator[list[str]]:
    """A neighbour of this machine that routes everything through it; yields the words that run a command there."""
    if os.getuid() != 0:
        pytest.skip("only root can make a network namespace")
    name = f"nb{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    first = ["ip", "link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}n", "netns", name]
    made = [["ip", "netns", "add", name], first, ["ip", "address", "add", "198.18.77.1/30", "dev", f"{name}h"]]
    made += [["ip", "link", "set", f"{name}h", "up"], [*inside, "ip", "link", "set", f"{name}n", "up"]]
    made += [[*inside, "ip", "address", "add", "198.18.77.2/30", "dev", f"{name}n"]]
    made += [[*inside, "ip", "route", "add", "default", "via", "198.18.77.1"]]
    try:
        for command in made:
            subprocess.run(command, check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)  # and the link with it


@pytest.fixture
def open_servers() -> Iterator[Callable[..., str]]:
    """A function that starts a server in a network that the engine does not protect, and returns its address."""
    name, started = f"tf-cluster-tests-{os.getpid()}", []
    unprotected = "--opt=com.docker.network.bridge.gateway_mode_ipv4=nat-unprotected"
    assert 0 == engine.ask("network", "create", unprotected, name)[0]

    def start(*options: str) -> str:
        words = ("run", "--detach", "--rm", f"--network={name}", "--publish=127.0.0.1::6006", *options)
        code, text = engine.ask(*words, "--entrypoint=python", TRAIN_IMAGE, "-m", "http.server", "6006", timeout_s=60)
        assert 0 == code, text
        started.append(text)
        return address_of(text)

    yield start
    for container in started:
        engine.ask("rm", "--force", container, timeout_s=60)
    engine.ask("network", "rm", name, timeout_s=60)


def address_of(container: str) -> str:
    """Return a container's own address."""
    _, text = engine.ask("inspect", "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container)
    return text


def answers(address: str, *where: str) -> bool:
    """Whether TensorBoard's port accepts a connection from here, or from where the words `where` run a command."""
    code = f"import socket; socket.create_connection(({address!r}, 6006), 3)"
    return 0 == subprocess.run([*where, sys.executable, "-c", code], capture_output=True).returncode


@pytest.mark.needs("ip")
def test_a_neighbour_must_not_reach_tensorboard(training, port, neighbour, open_servers):
    _, board = engine.ask("ps", "--quiet", "--filter", f"publish={port}")
    _, settings = engine.ask("inspect", "--format={{json .HostConfig.Sysctls}}", board)
    (setting,) = json.loads(settings).items()
    open_server, closed_server = open_servers(), open_servers("--sysctl={}={}".format(*setting))
    for address in (open_server, closed_server):
        wait_for(lambda address=address: answers(address), "the server to answer this machine")
    wait_for(lambda: answers(open_server, *neighbour), "the neighbour to have a route to containers", timeout_s=300)
    assert not answers(closed_server, *neighbour)
    assert answers(address_of(board))
    assert not answers(address_of(board), *neighbour)


def test_a_container_that_died_must_return_and_all_continue(clusters, training):
    result = json.loads(clusters.invoke("chaos", "kill", "worker-0", "--whole", "--run=contained", "--json"))
    assert None is result["ended"]
    assert [0, 1] == [containers(training)[task]["RestartCount"] for task in ("chief", "worker-0")]
    assert {1} == {beat.generation for beat in training.heartbeats().values()}


def test_stop_must_save_and_down_must_leave_nothing(clusters, training):
    wait_for(lambda: step_of(training) >= 10, "step 10")
    clusters.invoke("stop", "contained")
    assert "stopped" == summary(training)["state"]
    assert list(training.checkpoints.glob(f"ckpt-{summary(training)['steps']}.index"))
    clusters.invoke("down")
    assert {} == containers(training)
    _, networks = engine.ask("network", "ls", "--format", "{{.Name}}")
    assert not [name for name in networks.split() if name.startswith(compose_runtime.project(training.path))]
    board = tensorboard.compose_project(clusters.runs_dir)
    _, boards = engine.ask("ps", "--all", "--quiet", "--filter", f"name={board}")
    assert "" == boards
    assert training.path.exists()
