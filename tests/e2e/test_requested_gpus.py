"""Which GPUs containers ask an engine for, whose NVIDIA toolkit is a stand-in that only notes it (`.ci/nvidia/`).

The plans are those of a recorded host with eight GPUs, and the CPU image stands in for that with CUDA: there is no GPU.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from invoke import Config, Context, Exit

import tasks
from cluster.contract.run import records
from cluster.host.checks import gpu_image
from cluster.host.cli.command_line import shell
from cluster.host.gpu import placement
from cluster.host.image import engine, images
from cluster.host.launch import folders, teardown
from cluster.host.runtime import compose_services
from cluster.system.json_files import read_json
from cluster.system.ports import free_ports
from tests.e2e.scenario import TRAIN_IMAGE, Clusters
from tests.promises.test_containers_are_locked_down import containers

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("require_engine", "images")]

FAKE = "FAKE_GPU_"
"""What the stand-in's CDI devices put into a container's environment begins with it."""


@pytest.fixture(scope="module")
def noted(unavailable) -> Path:
    """The folder where the engine's stand-in keeps what containers ask for: WAY/ID.json."""
    _, text = engine.ask("info", "--format", "{{json .Runtimes}}")
    folder = Path(json.loads(text).get("nvidia", {}).get("path", "/absent/runtime")).parent / "asked"
    if not folder.is_absolute() or not folder.is_dir():
        unavailable("the engine has no stand-in for NVIDIA's toolkit; .ci/engine gives one to an engine that it starts")
    return folder


@pytest.fixture(scope="module")
def clusters(tmp_path_factory) -> Clusters:
    """Commands on a fresh folder of runs, without prepared data."""
    return Clusters(tmp_path_factory.mktemp("gpus"))


@pytest.fixture
def host(clusters, nvidia_smi, monkeypatch) -> Iterator[Context]:
    """A host with eight GPUs, and the CPU image in place of the GPU image; what its commands run with."""
    nvidia_smi("8-h100-nvswitch")
    monkeypatch.setenv("RUNS_DIR", str(clusters.runs_dir))
    monkeypatch.setattr(images, "train_image", lambda accelerator: TRAIN_IMAGE)
    monkeypatch.setattr(images, "build_images", lambda *_, **__: None)  # a fixture has built both
    # No engine may lift memlock without CAP_SYS_RESOURCE, which a machine for tests may lack.
    monkeypatch.setattr(compose_services, "GPU_LIMITS", {"stack": compose_services.GPU_LIMITS["stack"]})
    folders.data_dir().mkdir()
    context = Context(Config(overrides={"run": {"in_stream": False}}))
    context._set(remainder="")
    yield context
    for name in teardown.leftovers(clusters.runs_dir).found:
        run = clusters.run(name)
        teardown.kill(run, shell(context))
        teardown.record_end(run)  # no agent is left to write it, and until then its GPUs are taken
    clusters.invoke("down")


def requested(noted: Path, container: str) -> dict[str, list[str]]:
    """Return the GPUs that a container asked for, by the way in which it did; the beginning of its id is enough."""
    found = {}
    for record in noted.glob(f"*/{container}*.json"):
        environment = dict(entry.split("=", 1) for entry in read_json(record)["process"]["env"])
        devices = sorted(name.removeprefix(FAKE) for name in environment if name.startswith(FAKE))
        named = environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
        found[record.parent.name] = devices if record.parent.name == "cdi" else named
    return found


@pytest.mark.parametrize("way", placement.DEVICE_REQUESTS)
def test_each_task_must_ask_for_the_gpus_of_its_plan_and_the_others_for_none(clusters, noted, host, tmp_path, way):
    script = tmp_path / "theirs" / "pause.py"
    script.parent.mkdir()
    script.parent.chmod(0o755)
    script.write_text("import signal\n\nsignal.pause()\n")
    port = free_ports(1)[0] if way == placement.DEVICE_REQUEST else 0  # TensorBoard knows of no way: once is enough
    with pytest.raises(Exit) as ended:
        tasks.ns["up"](
            host, name=f"asked-{way}", script=str(script), workers="1", ps="1", gpus="2,3,6,7", gpu_runtime=way,
            runtime="docker", tensorboard_port=str(port), detach=True,
        )  # fmt: skip
    assert 0 == ended.value.code
    run = clusters.run(f"asked-{way}")
    expected = {"chief": {way: ["2", "3"]}, "worker-0": {way: ["6", "7"]}, "ps-0": {}}
    assert expected == {task: requested(noted, found["Id"]) for task, found in containers(run).items()}
    assert {"chief": ["2", "3"], "worker-0": ["6", "7"]} == read_json(run.compose)[records.GPUS]
    if port:
        _, board = engine.ask("ps", "--quiet", "--filter", f"publish={port}")
        assert board
        assert {} == requested(noted, board)


def test_the_doctor_must_find_every_way_that_the_engine_can(noted):
    assert set(placement.DEVICE_REQUESTS) == set(gpu_image.device_requests())


@pytest.mark.parametrize(
    ("way", "ids", "expected"),
    [
        ("reserve", ("2", "3"), ["2", "3"]),
        ("reserve", (), ["all"]),
        ("cdi", ("2", "3"), ["2", "3"]),
        ("cdi", (), list("01234567")),
    ],
)
def test_the_doctor_s_container_must_ask_for_the_gpus_that_it_looks_at(noted, host, way, ids, expected):
    code, name = gpu_image.run_image(way, ids, {}, "-c", "import socket; print(socket.gethostname())", timeout_s=60)
    assert (0, {way: expected}) == (code, requested(noted, name))


def test_the_doctor_must_report_why_its_container_does_not_start(noted, host):
    finding = gpu_image.judge_image(*gpu_image.run_image("cdi", ("9",), {}, "-c", "", timeout_s=60), count=1)
    assert "unresolvable CDI devices nvidia.com/gpu=9" in finding.detail
