"""The runtime of a Swarm with an engine that answers as recorded, and the stack that it renders."""

import json
from typing import Any

import pytest

from cluster.contract import spec
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.launch import planning
from cluster.host.options.request import Request
from cluster.host.runtime import registry, resources
from cluster.host.runtime.base import Workload
from cluster.host.runtime.payload import Payload
from cluster.host.runtime.resources import Job, Memory, Network
from cluster.host.schedulers import swarm_runtime
from cluster.host.schedulers.swarm_runtime import Swarm
from cluster.system.errors import PrerequisiteError, UsageError
from tests.support.launching import Commands, workload


class Engine:
    """A manager's engine: what it answers to the first words of a command, and what it was asked to run."""

    def __init__(self) -> None:
        self.swarm: dict[str, Any] = {"LocalNodeState": "active", "ControlAvailable": True, "Nodes": 2, "NodeID": "a"}
        self.nodes = [self.node("a", "h1"), self.node("b", "h2", engine="ssh://h2")]
        self.tasks: list[dict[str, str]] = []
        self.images = {"": "sha256:1", "ssh://h2": "sha256:1"}
        self.stacks: list[str] = []
        self.commands = Commands()

    @staticmethod
    def node(identity: str, name: str, state: str = "ready", availability: str = "active", engine: str = "") -> Any:
        labels = {swarm_runtime.ENGINE_LABEL: engine} if engine else {}
        spec_ = {"Availability": availability, "Labels": labels}
        return {"ID": identity, "Spec": spec_, "Description": {"Hostname": name}, "Status": {"State": state}}

    def ask(self, *words: str, timeout_s: float = 0) -> tuple[int, str]:
        host = ""
        if words[0] == "--host":
            host, words = words[1], words[2:]
        if words[0] == "info":
            return 0, self.swarm["NodeID"] if "NodeID" in words[-1] else json.dumps(self.swarm)
        answers = {
            "node ls": "a b",
            "node inspect": json.dumps(self.nodes),
            "stack ps": "\n".join(map(json.dumps, self.tasks)),
            "stack ls": "\n".join(self.stacks),
            "image inspect": self.images.get(host, ""),
            "secret ls": "",
            "network ls": "",
        }
        return 0, answers[" ".join(words[:2])]


@pytest.fixture
def manager(monkeypatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(swarm_runtime.engine, "ask", made.ask)
    monkeypatch.setattr(swarm_runtime, "POLL_S", 0.0)
    monkeypatch.setattr(swarm_runtime, "UNPLACED_S", -1.0)
    return made


@pytest.fixture
def run(make_run) -> RunFolder:
    folder = make_run("a-run", workers=1, evaluator=True)
    owner.create_owner(folder, "swarm")
    return folder


def work(run: RunFolder, job: Job | None = None, **more: Any) -> Workload:
    return workload(run, cluster=spec.build(workers=1, evaluator=True), job=job or Job(), **more)


def test_every_task_is_a_service_without_privileges(run):
    rendered = Swarm().render(work(run))
    assert ["chief", "worker-0", "evaluator"] == list(rendered["services"])
    found = rendered["services"]["worker-0"]
    assert ("dnsrr", "on-failure") == (found["deploy"]["endpoint_mode"], found["deploy"]["restart_policy"]["condition"])
    assert (True, ["ALL"], ["cluster"]) == (found["read_only"], found["cap_drop"], found["networks"])
    assert "worker-0" == found["hostname"] == found["environment"]["TASK"]
    assert "-1" == found["environment"]["CUDA_VISIBLE_DEVICES"]
    network = {"driver": "overlay", "internal": True, "labels": {"tf-cluster.run": "a-run"}}
    assert network == rendered["networks"]["cluster"]


def test_what_is_requested_of_the_swarm_is_in_the_stack(run):
    job = Job(constraint="node.labels.a == b, engine.labels.c!=d", cpus_per_task="2", gpus_per_task="4")
    given = work(run, job, memory=Memory("2GiB", 2**31), network=Network(resources.ENCRYPTED))
    rendered = Swarm().render(given)
    deploy = rendered["services"]["worker-0"]["deploy"]
    assert ["node.labels.a==b", "engine.labels.c!=d"] == deploy["placement"]["constraints"]
    assert {"pids": 4096, "memory": str(2**31), "cpus": "2"} == deploy["resources"]["limits"]
    gpus = {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 4}}
    assert [gpus] == deploy["resources"]["reservations"]["generic_resources"]
    assert "4" == rendered["services"]["worker-0"]["environment"]["GPUS_GIVEN"]
    assert rendered["services"]["worker-0"]["image"].endswith(":gpu")
    assert "generic_resources" not in rendered["services"]["evaluator"]["deploy"]["resources"]["reservations"]
    assert {"encrypted": "true"} == rendered["networks"]["cluster"]["driver_opts"]


def test_a_value_of_the_callers_is_a_secret(run, manager, monkeypatch):
    monkeypatch.setenv("A_KEY", "precious")
    given = work(run, payload=Payload(env=("A_KEY", "B=$c")))
    rendered = Swarm().render(given)
    name = swarm_runtime.stack_name(run.path)
    assert {"A_KEY": {"external": True, "name": f"{name}-A_KEY"}} == rendered["secrets"]
    assert "A_KEY" not in rendered["services"]["worker-0"]["environment"]
    assert "$$c" == rendered["services"]["worker-0"]["environment"]["B"]
    monkeypatch.setattr(swarm_runtime.images, "pending_commands", lambda accelerator: [accelerator])
    commands = Swarm().commands(given)[1:]
    assert commands[0].startswith('printf %s "$A_KEY" | docker secret create ')
    assert commands[1].endswith(f" {name}")
    assert "precious" not in json.dumps([rendered, commands])


def test_hosts_that_lack_the_image_get_it_where_their_engine_is_known(manager):
    assert ([], []) == swarm_runtime.carry_commands("an/image:cpu")
    manager.images["ssh://h2"] = "sha256:older"
    manager.nodes += [Engine.node("c", "h3"), Engine.node("d", "h4", availability="drain")]
    commands, unknown = swarm_runtime.carry_commands("an/image:cpu")
    assert ["docker save an/image:cpu | docker --host ssh://h2 load --quiet"] == commands
    assert ["h3"] == unknown
    assert ["warning"] == [each.state for each in Swarm().examine()]


def task(name: str, state: str, error: str = "") -> dict[str, str]:
    return {"Name": f"s_{name}.1", "CurrentState": f"{state} 2 seconds ago", "Error": error, "Node": "h2"}


def test_a_start_has_begun_once_every_task_has_a_host_and_one_that_none_can_start_is_an_error(run, manager):
    assert not Swarm().alive(run)
    manager.tasks = [task("chief", "Running"), task("worker-0", "Starting")]
    swarm_runtime._await_places("s", ["chief", "worker-0"])
    assert Swarm().alive(run)
    for state, error in (("Rejected", "No such image: tf-cluster/train:cpu"), ("Pending", "no suitable node")):
        manager.tasks[1] = task("worker-0", state, error)
        with pytest.raises(PrerequisiteError, match="worker-0"):
            swarm_runtime._await_places("s", ["chief", "worker-0"])


def test_what_is_left_is_found_and_removed_by_its_stack(run, manager):
    swarm, name = Swarm(), swarm_runtime.stack_name(run.path)
    swarm.remove(run, manager.commands, 10)
    assert [] == manager.commands
    manager.stacks = ["another", name]
    assert {"a-run"} == swarm.find_leftovers(run.path.parent, ["a-run", "another"])
    swarm.remove(run, manager.commands, 10)
    assert [f"docker stack rm --detach=false {name}"] == manager.commands
    for managed in ({"LocalNodeState": "inactive"}, {"LocalNodeState": "active", "ControlAvailable": False}):
        manager.swarm = managed
        with pytest.raises(PrerequisiteError):
            swarm.remove(run, manager.commands, 10)
        with pytest.raises(PrerequisiteError):
            registry.choose_runtime("swarm")
        assert [] == swarm.examine()
    names = {swarm_runtime.stack_name(run.path.with_name(end)) for end in ("x" * 63, "x" * 62 + "y")}
    assert 2 == len(names)
    assert all(len(f"{name}_worker-511") <= 63 for name in names)  # it leaves room for its services


@pytest.mark.parametrize(
    ("requested", "way_out", "warns"),
    [("", "", True), ("private", "", True), ("encrypted", "", False), ("encrypted", "where a script", True)],
)
def test_a_network_that_nothing_closes_is_warned_of(requested, way_out, warns):
    assert warns == bool(Swarm().network(requested, "", way_out=way_out, serves=True).warning)
    assert "" == Swarm().network(requested, "", way_out=way_out, serves=False).warning


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nodes": 2}, "--nodes"),
        ({"account": "physics"}, "--account"),
        ({"network": "host"}, "--network"),
        ({"gpus": "all"}, "--gpus"),
    ],
)
def test_what_a_swarm_cannot_give_is_refused(options, named, manager):
    with pytest.raises(UsageError, match=named):
        planning.plan(Request(runtime="swarm", tensorboard_port="0", **options))


def test_a_swarm_without_a_host_that_takes_tasks_is_refused(run, manager):
    Swarm().preflight(work(run))
    for node in manager.nodes:
        node["Spec"]["Availability"] = "drain"
    with pytest.raises(PrerequisiteError, match="docker node ls"):
        Swarm().preflight(work(run))
