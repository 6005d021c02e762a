"""Rendered pods as containers, with what a JobSet's controllers would do. No Kubernetes is here."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.contract.run.folder import RunFolder
from cluster.host.kubernetes import RECORDS, SHARED
from cluster.system.errors import EXIT_INTERRUPTED
from tests.e2e.scenario import DATA, TRAIN_IMAGE, TRAINING, step_of, summary
from tests.support.waiting import wait_for
from tests.unit.host.runtime.kubernetes.test_manifests import expanded

pytestmark = [pytest.mark.long, pytest.mark.docker, pytest.mark.usefixtures("require_engine", "images")]
KILLED = 137


@dataclass
class Pods:
    """The pods of a rendered JobSet, each a container."""

    objects: dict[str, Any]
    records: Path
    shared: Path
    network: str = field(default_factory=lambda: f"tf-cluster-test-{uuid.uuid4().hex[:8]}")

    @property
    def job(self) -> dict[str, Any]:
        return self.objects["JobSet"]

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.shared / "runs" / self.job["metadata"]["name"])

    def start(self) -> None:
        docker("network", "create", "--internal", self.network)
        for name, data in self.objects["ConfigMap"]["data"].items():
            (self.records / name).write_text(data)
        for job in self.job["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]
            for index in range(template["completions"]):
                self._start(job["name"], index, template["template"]["spec"])

    def _start(self, role: str, index: int, pod: dict[str, Any]) -> None:
        (container,) = pod["containers"]
        own = f"{self.network}-{role}-{index}"
        host = f"{self.job['metadata']['name']}-{role}-0-{index}"
        alias = f"{host}.{self.job['spec']['network']['subdomain']}"
        values: dict[str, str] = {}
        for variable in container["env"]:
            values[variable["name"]] = expanded(variable.get("value", str(index)), values)
        user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
        mounts = [f"{self.shared}:{SHARED}", f"{DATA}:{SHARED}/data:ro", f"{self.records}:{RECORDS}:ro"]
        words = ["run", "--detach", "--init", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        words += [f"--name={own}", f"--hostname={host}", f"--user={user}", "--tmpfs=/tmp"]
        words += [f"--network={self.network}", f"--network-alias={alias}", "--stop-timeout=60"]
        words += [f"--env={name}={value}" for name, value in values.items()] + [f"--volume={each}" for each in mounts]
        docker(*words, "--entrypoint", container["command"][0], container["image"], *container["command"][1:])

    def names(self) -> list[str]:
        return docker("ps", "--all", "--format={{.Names}}", f"--filter=network={self.network}").split()

    def ended(self) -> dict[str, int]:
        names = self.names()
        output = docker("inspect", "--format={{.State.Status}} {{.State.ExitCode}}", *names).splitlines()
        states = dict(zip(names, (line.split() for line in output), strict=True))
        return {name: int(code) for name, (state, code) in states.items() if state == "exited"}

    def finish(self) -> None:
        """Start again what may be, as the failure policy has it, until every pod has ended for good."""

        def look() -> bool:
            ended = self.ended()
            if again := [name for name, code in ended.items() if code in (EXIT_INTERRUPTED, KILLED)]:
                docker("start", *again)
            return not again and len(ended) == len(self.names())

        wait_for(look, "every pod to end", timeout_s=240)

    def remove(self) -> None:
        if names := self.names():
            docker("rm", "--force", *names)
        docker("network", "rm", self.network)


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture
def pods(clusters, tmp_path) -> Iterator[Pods]:
    """Chief and a worker, rendered and not started."""
    shared = tmp_path / "shared"
    (shared / "data").mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:2], shared):
        folder.chmod(0o755)
    os.chown(shared, 10001, 10001)
    words = ["k8s.render", "--name=pods", "--workers=1", f"--image={TRAIN_IMAGE}"]
    output = clusters.invoke(*words, "--", *TRAINING, "--max-steps", "80")
    documents = YAML(typ="safe").load_all(output[output.index("apiVersion") :])  # after the warning
    (records := tmp_path / "records").mkdir()
    made = Pods({each["kind"]: each for each in documents}, records, shared)
    yield made
    made.remove()
    shutil.rmtree(shared)


@pytest.fixture(scope="module")
def local_hash(clusters) -> str:
    """The weights of the same training as local processes."""
    return summary(clusters.up("as-processes", "--workers 1 -- --max-steps 80"))["weights_sha256"]


def test_pods_survive_the_loss_of_one_and_the_eviction_of_another(pods, local_hash):
    pods.start()
    chief, worker = (f"{pods.network}-{role}-0" for role in ("chief", "worker"))
    wait_for(lambda: step_of(pods.run) >= 10, "step 10", timeout_s=90)
    docker("kill", worker)
    docker("start", worker)
    wait_for(lambda: pods.run.generation == 1 and step_of(pods.run) >= 30, "training after the loss", timeout_s=90)
    docker("stop", chief)
    wait_for(lambda: len(pods.ended()) == 2, "every pod to stop with the one that is evicted")
    assert {EXIT_INTERRUPTED} == set(pods.ended().values())
    pods.finish()
    assert {0} == set(pods.ended().values())
    assert ("succeeded", local_hash) == (summary(pods.run)["state"], summary(pods.run)["weights_sha256"])
