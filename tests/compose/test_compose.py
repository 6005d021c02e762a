"""The containers of a run, as Docker Compose itself reads them.

`compose/example.json` is the overlay of a chief, two workers, a parameter server and an evaluator;
`compose/example-gpu.json` that of a chief and a worker with two GPUs each, and a parameter server with none. After a
change that is meant to alter them, renew them and look at the difference:

    UPDATE_GOLDEN=1 python -m pytest tests/compose && git diff compose
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.agent import attempt
from cluster.contract import settings, spec
from cluster.contract.run.folder import RunFolder
from cluster.host.nvidia import Placement
from cluster.host.runtime import compose_runtime, tensorboard
from cluster.host.runtime.compose_runtime import FILES
from cluster.host.runtime.payload import Payload, container_variables
from cluster.host.runtime.resources import EGRESS, Memory, Network
from cluster.system.files import ROOT
from tests.support.launching import workload

EXAMPLE = FILES / "example.json"
GPU_EXAMPLE = FILES / "example-gpu.json"
TOPOLOGIES = {
    "chief alone": {"workers": 0},
    "chief and evaluator": {"workers": 0, "evaluator": True},
    "synchronous": {"workers": 2},
    "parameter servers": {"workers": 2, "ps": 2, "evaluator": True},
}
MEMORY_BYTES = 8 * 2**30
EVERY_TASK = ["chief", "worker-0", "worker-1", "ps-0", "ps-1", "evaluator"]

Config = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def caller(monkeypatch):
    """A caller of `up` with user id 1000, and no variable that tasks inherit."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 1000)
    for name in container_variables(way_out=True):
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def compose_cli(unavailable):
    """Docker Compose; its `config` needs no engine. Without it a test is skipped, with CI=true it fails."""
    try:
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        unavailable("`docker compose` is not installed")


@pytest.fixture
def config(compose_cli, tmp_path) -> Config:
    """Returns the services and networks of a topology, as `docker compose config` understands them."""

    def read(data_dir: str = "data", brought: dict[str, Any] | None = None, **topology: Any) -> dict[str, Any]:
        path = tmp_path / "compose.json"
        path.write_text(rendered(tmp_path / "runs" / "a-run", tmp_path / data_dir, topology, brought or {}))
        return read_config(compose_runtime.overlay_command(path, "config", "--format", "json"))

    return read


def rendered(run_dir: Path, data_dir: Path, topology: dict[str, Any], brought: dict[str, Any], **layout: Any) -> str:
    """Return the overlay of a run, as JSON."""
    cluster, memory = spec.build(**topology), Memory("", MEMORY_BYTES)
    work = workload(RunFolder(run_dir), cluster=cluster, data_dir=data_dir, memory=memory, **brought)
    return json.dumps(compose_runtime.render_overlay(work), **layout)


def read_config(command: str) -> dict[str, Any]:
    """Run a `docker compose config` command; no warning may be among what it says."""
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (0, "") == (done.returncode, done.stderr)
    return json.loads(done.stdout)


def seconds(duration: str) -> float:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


# The tasks of a run


LOCKED_OUT = {"ports", "privileged", "cap_add", "devices", "network_mode", "pid", "ipc"}


def check_locked_down(name: str, task: dict[str, Any], *networks: str) -> None:
    assert dict.fromkeys(networks) == task["networks"], name
    assert True is task["read_only"] is task["init"], name
    assert ["ALL"] == task["cap_drop"], name
    assert ["no-new-privileges:true"] == task["security_opt"], name
    assert "1000:1000" == task["user"], name
    assert not LOCKED_OUT & set(task), name
    assert 0 < task["pids_limit"] <= 4096, name
    assert (MEMORY_BYTES, MEMORY_BYTES) == (int(task["mem_limit"]), int(task["memswap_limit"])), name


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_every_task_is_a_service_locked_down_and_sees_its_run_and_the_data_alone(config, topology, tmp_path):
    read = config(**topology)
    assert [task.name for task in spec.build(**topology).tasks] == sorted(read["services"], key=EVERY_TASK.index)
    assert {"cluster"} == set(read["networks"])  # TensorBoard and its network are no part of a run
    assert read["networks"]["cluster"]["internal"]
    assert {"com.docker.network.bridge.inhibit_ipv4": "true"} == read["networks"]["cluster"]["driver_opts"]
    for name, task in read["services"].items():
        check_locked_down(name, task, "cluster")
        assert ["/tmp:mode=1777,size=1g"] == task["tmpfs"], name
        run, data = task["volumes"]
        assert ("bind", str(tmp_path / "runs" / "a-run"), "/runs/a-run") == (run["type"], run["source"], run["target"])
        assert ("bind", str(tmp_path / "data"), "/data") == (data["type"], data["source"], data["target"])
        assert (False, True) == (run.get("read_only", False), data["read_only"]), name
        assert task.get("command") is None, name
        assert (topology["workers"] == 0) is ("TF_CONFIG" not in task["environment"]), name


def test_every_task_can_be_watched_stopped_and_brought_back(config):
    for name, task in config(**TOPOLOGIES["parameter servers"])["services"].items():
        # An agent that was killed comes back; one that saw the run's end exits 0 and does not.
        assert "on-failure" == task["restart"], name
        assert "SIGTERM" == task["stop_signal"], name
        assert seconds(task["stop_grace_period"]) >= attempt.GRACE_S + 10, name
        assert ["CMD", "python", "-m", "cluster.agent.schedulers.health"] == task["healthcheck"]["test"], name
        assert 10 <= seconds(task["healthcheck"]["interval"]) <= 15, name  # tasks start in less
        assert seconds(task["healthcheck"]["start_period"]) >= settings.SECONDS["RENDEZVOUS_TIMEOUT_S"].default, name
        assert {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}} == task["logging"], name


def test_hostile_words_stay_words(config, tmp_path):
    nasty = ["${X:-y}", "$$", "\n- privileged: true", "'\" \\", "# no comment", "!!int 1", "a: b", "\x1b[2J"]
    nasty += ["\t", "{}", "*a", "~"]
    environment = {f"V{at}": word for at, word in enumerate(nasty)}
    env = tuple(f"{name}={word}" for name, word in environment.items())
    payload = Payload(Path("/theirs/train.py"), tuple(nasty), env=env)
    read = config(data_dir="a:b ${X:-y} '\"#", brought={"payload": payload}, workers=0)
    task = read["services"]["chief"]
    assert ["--script", "/script/train.py", *nasty] == [word.replace("$$", "$") for word in task["command"]]
    assert environment.items() <= {name: word.replace("$$", "$") for name, word in task["environment"].items()}.items()
    assert f"{tmp_path}/a:b ${{X:-y}} '\"#" == task["volumes"][1]["source"].replace("$$", "$")
    assert "privileged" not in task
    read = read_config(tensorboard.compose_command(Path("/a:/b"), 6007, "config", "--format", "json"))
    (runs,) = read["services"]["tensorboard"]["volumes"]
    assert ("/a:/b", "/runs", True) == (runs["source"], runs["target"], runs["read_only"])


# The tasks of a script


SCRIPT = Payload(Path("/theirs/train.py"), ("--epochs", "1"), (), None, Path("/packages/kept"))


def test_a_script_gets_its_folders_read_only_and_a_way_out(config, monkeypatch, tmp_path):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    read = config(brought={"payload": SCRIPT}, workers=2)
    assert (True, False) == tuple(read["networks"][name].get("internal", False) for name in ("cluster", "egress"))
    for name in ("chief", "worker-0", "worker-1"):
        task = read["services"][name]
        assert ["--script", "/script/train.py", "--epochs", "1"] == task["command"]
        check_locked_down(name, task, "cluster", "egress")
        more = {v["target"]: (v["source"], v.get("read_only", False)) for v in task["volumes"][2:]}
        shared = {"/tmp": (str(tmp_path / "runs" / ".scratch" / "a-run"), False)}
        assert {"/script": ("/theirs", True), "/packages": ("/packages/kept", True)} | shared == more
        assert ["/var/tmp:mode=1777,size=1g"] == task["tmpfs"], name  # scratch and downloads are each task's own
        environment = task["environment"]
        assert ("/var/tmp", "/var/tmp") == (environment["HOME"], environment["TMPDIR"])
        assert ("/packages", "1") == tuple(environment[key] for key in ("PYTHONPATH", "PYTHONUNBUFFERED"))
        assert "http://proxy" == environment["HTTPS_PROXY"]  # as Compose finds it, the overlay does not hold it


def test_the_built_in_trainer_gets_a_way_out_where_it_is_requested(config):
    read = config(brought={"network": Network(EGRESS)}, workers=1)
    for name in ("chief", "worker-0"):
        check_locked_down(name, read["services"][name], "cluster", "egress")


def test_a_secret_is_in_a_file_and_nowhere_else(config, tmp_path):
    key = tmp_path / "key"
    key.write_text("precious\n")
    read = config(brought={"payload": Payload(secrets={"WANDB_API_KEY": key})}, workers=1)
    for name in ("chief", "worker-0"):
        task = read["services"][name]
        mounted = {volume["source"]: (volume["target"], volume.get("read_only")) for volume in task["volumes"]}
        assert ("/run/secrets/WANDB_API_KEY", True) == mounted[str(key)]
        assert {"WANDB_API_KEY": "/run/secrets/WANDB_API_KEY"} == json.loads(task["environment"]["SECRET_FILES"])
        assert "WANDB_API_KEY" not in task["environment"]
    assert "precious" not in json.dumps(read)


# TensorBoard


def test_tensorboard_is_published_on_loopback_only(compose_cli, tmp_path):
    read = read_config(tensorboard.compose_command(tmp_path / "runs", 6007, "config", "--format", "json"))
    assert ["tensorboard"] == list(read["services"])
    board = read["services"]["tensorboard"]
    assert [("127.0.0.1", "6007", 6006)] == [(p["host_ip"], p["published"], p["target"]) for p in board["ports"]]
    assert {"front": None} == board["networks"]  # not the network of the tasks
    (runs,) = board["volumes"]
    assert (str(tmp_path / "runs"), "/runs", True) == (runs["source"], runs["target"], runs["read_only"])
    assert True is board["read_only"] is board["init"]
    assert (["ALL"], ["no-new-privileges:true"]) == (board["cap_drop"], board["security_opt"])
    assert compose_runtime.task_user() == board["user"]
    assert "max-size" in board["logging"]["options"]


# Tasks with GPUs


def with_gpus() -> dict[str, Any]:
    """Return the GPUs of the containers of a chief and one worker: two each."""
    return {"gpus": Placement({"chief": ("0", "1"), "worker-0": ("2", "3")}, "4")}


def test_a_task_sees_its_own_gpus_and_is_locked_down_all_the_same(config):
    services = config(brought=with_gpus(), workers=1, ps=1, evaluator=True)["services"]
    for name, ids in (("chief", ["0", "1"]), ("worker-0", ["2", "3"])):
        task = services[name]
        environment = task["environment"]
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        assert {"reservations": {"devices": [device]}} == task["deploy"]["resources"]
        assert not {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"} & set(environment)
        assert {"memlock": -1, "stack": 67108864} == task["ulimits"], name
        assert 2**30 == int(task["shm_size"]), name
        expected = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "GPUS_GIVEN": "2"}
        assert expected.items() <= environment.items(), name
        check_locked_down(name, task, "cluster")
    for name in ("ps-0", "evaluator"):
        task = services[name]
        environment = task["environment"]
        assert ("-1", "void") == (environment["CUDA_VISIBLE_DEVICES"], environment["NVIDIA_VISIBLE_DEVICES"])
        assert not {"runtime", "ulimits", "shm_size"} & set(task), name
        assert not task.get("deploy"), name
        assert not [key for key in environment if key.startswith("NCCL") or key == "GPUS_GIVEN"], name


# Whom tasks run as, and what runs are called


@pytest.mark.parametrize(
    ("uid", "gid", "expected"), [(1000, 1000, "1000:1000"), (0, 0, "10001:10001"), (1000, 0, "1000:10001")]
)
def test_tasks_run_as_the_caller_but_never_as_root(monkeypatch, uid, gid, expected):
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(os, "getgid", lambda: gid)
    assert expected == compose_runtime.task_user()


@pytest.mark.parametrize("name", ["a", "Fashion_MNIST-2026.01.01", "x" * 63, "A.-_", "9"])
def test_a_project_s_name_is_legal_and_of_one_folder(name):
    project = compose_runtime.project(Path("/here/runs") / name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", project)
    assert project != compose_runtime.project(Path("/there/runs") / name)
    assert project != tensorboard.compose_project(Path("/here/runs"))


# The examples


def example(*, gpus: bool) -> str:
    """Return the overlay of an example, with paths that mean nothing on any machine."""
    topology = {"workers": 1, "ps": 1, "devices": 2} if gpus else {"workers": 2, "ps": 1, "evaluator": True}
    folder = Path("/path/to/this/checkout")
    text = (
        rendered(folder / "runs" / "example", folder / "data", topology, with_gpus() if gpus else {}, indent=2) + "\n"
    )
    files = json.dumps(f"{FILES}/".replace("$", "$$"))[1:-1]
    return text.replace(files, "")  # the templates are next to the example


@pytest.mark.parametrize(("path", "gpus"), [(EXAMPLE, False), (GPU_EXAMPLE, True)])
def test_the_example_is_what_the_code_makes(path, gpus):
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(example(gpus=gpus))
    assert path.read_text() == example(gpus=gpus)
