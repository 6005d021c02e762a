"""Which GPUs containers ask an engine for, whose NVIDIA toolkit is a stand-in that only notes it (`.ci/nvidia/`).

The plans are those of a recorded host with eight GPUs, and the CPU image stands in for that with CUDA: there is no GPU.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from invoke import Config, Context, Exit

import tasks
from cluster.contract.run import launch_records
from cluster.host.cli.command_line import shell
from cluster.host.image import engine, images
from cluster.host.launch import folders, teardown
from cluster.host.runtime import compose_runtime
from cluster.system.json_files import read_json
from cluster.system.ports import free_ports
from tests.e2e.scenario import TRAIN_IMAGE, Clusters
from tests.promises.test_containers_are_locked_down import containers

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("require_engine", "images")]


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
    monkeypatch.setattr(compose_runtime, "GPU_LIMITS", {"stack": compose_runtime.GPU_LIMITS["stack"]})
    folders.data_dir().mkdir()
    context = Context(Config(overrides={"run": {"in_stream": False}}))
    context._set(remainder="")
    yield context
    for name in teardown.find_leftovers(clusters.runs_dir)[0]:
        run = clusters.run(name)
        teardown.remove_run(run, shell(context), grace_s=0)
        teardown.record_end(run)  # no agent is left to write it, and until then its GPUs are taken
    clusters.invoke("down")


def requested(noted: Path, container: str) -> dict[str, list[str]]:
    """Return the GPUs that a container asked for, by the way in which it did; the beginning of its id is enough."""
    found = {}
    for record in noted.glob(f"*/{container}*.json"):
        environment = dict(entry.split("=", 1) for entry in read_json(record)["process"]["env"])
        found[record.parent.name] = environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    return found


@pytest.mark.extended
def test_each_task_must_ask_for_the_gpus_of_its_plan_and_the_others_for_none(clusters, noted, host, tmp_path):
    script = tmp_path / "theirs" / "pause.py"
    script.parent.mkdir()
    script.parent.chmod(0o755)
    script.write_text("import signal\n\nsignal.pause()\n")
    port = free_ports(1)[0]
    with pytest.raises(Exit) as ended:
        tasks.ns["up"](
            host, name="asked", script=str(script), workers="1", ps="1", gpus="2,3,6,7",
            runtime="docker", tensorboard_port=str(port), detach=True,
        )  # fmt: skip
    assert 0 == ended.value.code
    run = clusters.run("asked")
    expected = {"chief": {"reserve": ["2", "3"]}, "worker-0": {"reserve": ["6", "7"]}, "ps-0": {}}
    assert expected == {task: requested(noted, found["Id"]) for task, found in containers(run).items()}
    assert {"chief": ["2", "3"], "worker-0": ["6", "7"]} == read_json(run.compose)[launch_records.GPUS]
    _, board = engine.ask("ps", "--quiet", "--filter", f"publish={port}")
    assert board
    assert {} == requested(noted, board)
