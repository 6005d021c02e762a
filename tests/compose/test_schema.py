"""Every Compose file of ours against the Compose Specification's own schema, which asks no Docker of this machine.

Compose itself reads leniently where its release knows less or more; the specification is what any engine goes by. Its
schema comes with check-jsonschema, which keeps a copy of it.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from cluster.contract import spec
from cluster.contract.run.folder import RunFolder
from cluster.host.gpu.placement import Placement
from cluster.host.runtime import compose_services
from cluster.host.runtime.compose_services import FILES
from cluster.host.runtime.payload import Payload
from tests.support.launching import workload

TOPOLOGIES = {
    "chief alone": {"workers": 0},
    "synchronous": {"workers": 2},
    "parameter servers": {"workers": 1, "ps": 2, "evaluator": True},
}
SCRIPT = Payload(Path("/theirs/train.py"), ("--epochs", "1"), (), None, Path("/packages/kept"))


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    """The specification's schema."""
    vendored = resources.files("check_jsonschema.builtin_schemas") / "vendor" / "compose-spec.json"
    return Draft202012Validator(json.loads(vendored.read_bytes()))


def complaints(validator: Draft202012Validator, document: Any) -> list[str]:
    """Return where a document is not what the specification says, each with the reason."""
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def rendered(topology: dict[str, Any], *, gpus: bool = False, scripted: bool = False) -> dict[str, Any]:
    """Return a run's `compose.json`: a task with GPUs has two."""
    cluster = spec.build(**topology)
    named = [task.name for task in cluster.tasks if gpus and task.role.value in ("chief", "worker")]
    placed = Placement({name: (str(2 * at), str(2 * at + 1)) for at, name in enumerate(named)}, "all")
    payload = SCRIPT if scripted else Payload()
    work = workload(RunFolder(Path("/runs/a-run")), cluster=cluster, payload=payload, gpus=placed)
    made = {"x-runtime": "docker", **compose_services.render_overlay(work)} | placed.record()
    return json.loads(json.dumps(made))


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_a_file_of_the_checkout_is_what_the_specification_says(validator, path):
    assert [] == complaints(validator, YAML(typ="safe").load(path))  # JSON is YAML


@pytest.mark.parametrize("scripted", [False, True], ids=["trainer", "script"])
@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_an_overlay_is_what_the_specification_says(validator, topology, gpus, scripted):
    assert [] == complaints(validator, rendered(topology, gpus=gpus, scripted=scripted))
