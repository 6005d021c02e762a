"""Runs on the two hosts of `.ci/swarm`: the weights of local processes, whatever happens to a host."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.contract.run.folder import RunFolder
from cluster.host.schedulers import swarm_runtime
from cluster.system.ports import free_ports
from tests.e2e.scenario import ENDLESS, TENSORBOARD_IMAGE, TRAIN_IMAGE, Clusters, await_members, step_of, summary
from tests.support.waiting import await_shown, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.alone, pytest.mark.usefixtures("require_engine")]
HOSTS = Path("/var/lib/tf-cluster-swarm")
SAVING = "--checkpoint-every=60"
OPTIONS = ("--workers=1", SAVING)
TRAINING = ("--max-steps=400", "--log-every=10", "--evaluate-every=100000")


def at(host: str, *words: str) -> str:
    command = ["docker", "--host", f"unix://{HOSTS / host / 'docker.sock'}", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(scope="module")
def swarm(clusters, images, unavailable) -> Clusters:
    """Commands whose engine is that of the manager, which has the images of this checkout."""
    try:
        at("h1", "node", "ls")
    except (OSError, subprocess.SubprocessError) as error:
        unavailable(f"no Swarm of .ci/swarm answers: {type(error).__name__}")
    if any(identity_of(image) != identity_of(image, "h1") for image in (TRAIN_IMAGE, TENSORBOARD_IMAGE)):
        # Bring the images, and what they are built on, from this machine's engine to the manager's.
        save = ["docker", "save", TRAIN_IMAGE, TENSORBOARD_IMAGE, "tf-cluster/base:bookworm"]
        with subprocess.Popen(save, stdout=subprocess.PIPE) as saved:
            load = ["docker", "--host", f"unix://{HOSTS / 'h1' / 'docker.sock'}", "load", "--quiet"]
            subprocess.run(load, stdin=saved.stdout, check=True, timeout=600)
        assert 0 == saved.returncode
    return Clusters(clusters.runs_dir, {"DOCKER_HOST": f"unix://{HOSTS / 'h1' / 'docker.sock'}"})


def identity_of(image: str, host: str = "") -> str:
    """Return an image's id on the engine of a host, or of this machine; empty where it is not there."""
    at_host = ["--host", f"unix://{HOSTS / host / 'docker.sock'}"] if host else []
    command = ["docker", *at_host, "image", "inspect", "--format={{.Id}}", image]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture(scope="module")
def local_hash(clusters) -> str:
    """The weights of the same training as local processes."""
    return summary(clusters.up("as-processes", *OPTIONS, training=TRAINING))["weights_sha256"]


@pytest.fixture
def run(swarm, local_hash, request) -> Iterator[RunFolder]:
    """A run that trains on both hosts, called after the test."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name)[-40:].strip("-")
    run = swarm.up(name, "--detach", *OPTIONS, runtime="swarm", training=TRAINING, timeout_s=500)
    assert {"h1", "h2"} == set(places(run).values())
    yield run
    swarm.invoke("down", name)
    assert "" == at("h1", "stack", "ls", "--format={{.Name}}")


def places(run: RunFolder) -> dict[str, str]:
    """Return the host of each task that is to run; empty for one that has none yet."""
    name = swarm_runtime.stack_name(run.path)
    shown = ""
    with contextlib.suppress(subprocess.CalledProcessError):  # of a stack without such a task at this moment
        shown = at("h1", "stack", "ps", "--filter=desired-state=running", "--format={{.Name}} {{.Node}}", name)
    tasks = (line.partition(" ") for line in shown.splitlines())
    return {task.removeprefix(f"{name}_").split(".")[0]: host for task, _, host in tasks}


def await_same_weights(swarm: Clusters, run: RunFolder, expected: str) -> None:
    swarm.invoke("wait", run.name, timeout_s=400)
    assert ("succeeded", expected) == (summary(run)["state"], summary(run)["weights_sha256"])
    assert run.generation > 0


@pytest.mark.site
def test_hosts_must_train_to_the_weights_of_processes(run, swarm, local_hash):
    wait_for(lambda: step_of(run) >= 60, "step 60", timeout_s=120)
    swarm.invoke("chaos", "kill", "worker-0", timeout_s=300)
    await_same_weights(swarm, run, local_hash)


def cut_off(run: RunFolder) -> None:
    """Take the link of h2 down, and up again after a while."""
    subprocess.run(["ip", "link", "set", "tfs-h2", "down"], check=True)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: False, "the cut to last", timeout_s=20)
    subprocess.run(["ip", "link", "set", "tfs-h2", "up"], check=True)


def drain(run: RunFolder) -> None:
    """Take h2 out of service, as for its maintenance."""
    at("h1", "node", "update", "--availability=drain", "h2")
    wait_for(lambda: places(run) == {"chief": "h1", "worker-0": "h1"}, "every task on h1", timeout_s=120)


@pytest.fixture
def both_hosts() -> Iterator[None]:
    """Both hosts take tasks again after the test."""
    yield
    subprocess.run(["ip", "link", "set", "tfs-h2", "up"], check=True)
    at("h1", "node", "update", "--availability=active", "h2")
    wait_for(lambda: at("h1", "node", "ls", "--format={{.Status}}").split() == ["Ready"] * 2, "h2 to be back")


@pytest.mark.usefixtures("both_hosts")
@pytest.mark.parametrize("event", [cut_off, drain])
def test_a_run_that_loses_a_host_must_continue_to_the_same_weights(event, run, swarm, local_hash):
    wait_for(lambda: step_of(run) >= 60, "step 60", timeout_s=120)
    event(run)
    assert run.outcome is None or run.continues_elsewhere, "the run ended before the event did"
    await_same_weights(swarm, run, local_hash)


@pytest.mark.usefixtures("both_hosts")
def test_an_elastic_run_must_continue_without_a_host_and_grow_again(swarm, monkeypatch):
    monkeypatch.setitem(swarm.environment, "RENDEZVOUS_TIMEOUT_S", "25")
    memory = int(at("h1", "info", "--format={{.MemTotal}}")) * 6 // 10 // 2**20  # so that no host has room for two
    training = (*TRAINING[1:], "--global-batch=48", "--steps-per-loop=5")
    elastic = (f"--memory={memory}MiB", "--min-workers=0", "--grow", "--bitwise-elastic=4")
    words = ("--detach", *OPTIONS, *elastic, "--", *ENDLESS)
    run = swarm.up("elastic", *words, runtime="swarm", training=training, timeout_s=500)
    wait_for(lambda: step_of(run) >= 60, "step 60", timeout_s=120)
    subprocess.run(["ip", "link", "set", "tfs-h2", "down"], check=True)
    await_members(run, "worker-0")
    subprocess.run(["ip", "link", "set", "tfs-h2", "up"], check=True)
    await_members(run)
    swarm.check_bits(run, *OPTIONS, "--bitwise-elastic=4", training=training)
    swarm.invoke("down", "elastic")


def test_every_command_must_mean_the_same_on_hosts(swarm):
    at("h2", "image", "rm", "--force", TRAIN_IMAGE)  # and no host can pull it
    (port,) = free_ports(1)
    words = ("--workers=1", "--ps=1", "--detach", SAVING, "--", *ENDLESS)
    run = swarm.up("ps", *words, runtime="swarm", training=TRAINING, port=port, timeout_s=500)
    assert {"h1", "h2"} == set(places(run).values())
    assert identity_of(TRAIN_IMAGE, "h1") == identity_of(TRAIN_IMAGE, "h2")
    await_shown(port, "ps/chief")
    swarm.invoke("chaos", "kill", "worker-0", timeout_s=300)
    assert 0 == run.generation, "under parameter servers only the worker starts again"
    swarm.invoke("scale", "--workers=2", "--run=ps", timeout_s=300)
    assert ["chief", "worker-0", "worker-1", "ps-0"] == [task.name for task in run.load_cluster().tasks]
    assert set(places(run)) == {task.name for task in run.load_cluster().tasks}
    status = json.loads(swarm.invoke("status", "--json", "--run=ps"))
    assert ("training", 4) == (status["state"], len(status["tasks"]))
    assert "step " in swarm.invoke("logs", "chief", "--run=ps")
    swarm.invoke("stop", "ps")
    assert "stopped" == summary(run)["state"]
    swarm.invoke("down", "ps")
    assert "" == at("h1", "stack", "ls", "--format={{.Name}}")


@pytest.mark.site
def test_a_script_gets_its_secret_and_separate_folders_on_every_host(swarm, tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, tempfile\n"
        "print('secret of length', len(os.environ['A_SECRET']))\n"
        "print('own', pathlib.Path.home(), tempfile.gettempdir())\n"
    )
    script.chmod(0o644)
    given = Clusters(swarm.runs_dir, swarm.environment | {"A_SECRET": "x" * 12})
    words = ("--workers=1", f"--script={script}", "--env=A_SECRET")
    run = given.up("secret", *words, runtime="swarm", training=(), timeout_s=300)
    assert "succeeded" == summary(run)["state"]
    for task in ("chief", "worker-0"):
        assert "secret of length 12" in run.log(task).read_text()
        assert "own /var/tmp /var/tmp" in run.log(task).read_text()  # and not the /tmp that they share
    assert "x" * 12 not in run.compose.read_text()
    assert "" == at("h1", "secret", "ls", "--quiet")
