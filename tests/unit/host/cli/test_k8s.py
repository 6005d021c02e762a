"""`invoke k8s.render`: the same options make the same text, and wrong ones are refused."""

import json
import re

import pytest

from cluster.host import kubernetes
from cluster.host.options.request import Request
from cluster.system.errors import UsageError
from cluster.system.paths import ROOT
from tests.support.command_line import invoke

GOLDEN = ROOT / "tests" / "unit" / "host" / "runtime" / "kubernetes" / "golden"
RENDERED = {
    "jobset": ["--evaluator"],
    "tfjob": ["--kind=tfjob", "--workers=2", "--ps=1", "--gpus-per-task=2", "--image=registry.example/train:gpu"],
}


@pytest.mark.parametrize("kind", RENDERED)
def test_the_golden_manifests_are_what_is_rendered(kind):
    done = invoke("k8s.render", *RENDERED[kind])
    assert kubernetes.WARNING in done.stderr
    # The training's configuration changes with every new setting.
    training = re.compile(r"^  config\.json: \|\n(    .*\n)+", re.MULTILINE)
    assert training.sub("", (GOLDEN / f"{kind}.yaml").read_text()) == training.sub("", done.stdout)


def test_data_is_prepared_by_a_job_of_its_own():
    (job,) = kubernetes.render(Request(name="one"), data=True)
    assert ("Job", "one-data") == (job["kind"], job["metadata"]["name"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert ["python", "-m", "train.data", "prepare"] == container["command"]
    assert "--name=fashion_mnist" in container["args"]


def test_a_task_has_as_many_threads_as_its_pod_requests_cpus_and_variables_of_env_win():
    """Whatever machine renders: the bits of a run depend on its threads."""
    rendered = kubernetes.render(Request(gpus_per_task=2, env=("NCCL_DEBUG=INFO",)), cpus="5")
    assert 5 == json.loads(rendered[0]["data"]["config.json"])["threads"]
    assert str({"name": "NCCL_DEBUG", "value": "INFO"}) in str(rendered)


@pytest.mark.parametrize(
    ("request_", "place", "option"),
    [
        (Request(name="A_run"), {}, "--name"),
        (Request(name="a" * 41), {}, "--name"),
        (Request(), {"kind": "pod"}, "--kind"),
        (Request(gpus_per_task=2, devices=3), {}, "--devices"),
        (Request(devices=2), {}, "--workers 5"),
        (Request(memory="1MiB"), {}, "--memory"),
        (Request(strategy="tpu"), {}, "--strategy"),
        (Request(workers=4), {}, "--global-batch"),
        (Request(), {"cpus": "0"}, "--cpus"),
    ],
)
def test_what_cannot_be_rendered_is_refused(request_, place, option):
    with pytest.raises(UsageError, match=option):
        kubernetes.render(request_, **place)


def test_help_lists_what_can_be_rendered_alone():
    output = invoke("--help-all", "k8s.render").stdout
    assert "--gpus-per-task" in output
    assert not [name for name in kubernetes.NOT_RENDERED if f"--{name.replace('_', '-')}=" in output]
