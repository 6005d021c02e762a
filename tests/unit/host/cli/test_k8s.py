"""`invoke k8s.render`: the same options make the same text, and wrong ones are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.host.launch import kubernetes
from cluster.host.launch.kubernetes import Place
from cluster.host.options.request import Request
from cluster.system.errors import UsageError
from cluster.system.paths import ROOT

GOLDEN = ROOT / "tests" / "unit" / "host" / "runtime" / "kubernetes" / "golden"
RENDERED = {
    "jobset": ["--evaluator"],
    "tfjob": ["--kind=tfjob", "--workers=2", "--ps=1", "--gpus-per-task=2", "--image=registry.example/train:gpu"],
}


@pytest.mark.parametrize("kind", RENDERED)
def test_the_golden_base_is_what_is_rendered(kind, tmp_path):
    command = [sys.executable, "-m", "invoke", "k8s.render", *RENDERED[kind], "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert kubernetes.WARNING in done.stderr
    assert contents(GOLDEN / kind) == contents(tmp_path)


def contents(base: Path) -> dict[str, str]:
    """Return the text of each file, without the training's configuration, which every new setting changes."""
    training = re.compile(r"^  config\.json: \|\n(    .*\n)+", re.MULTILINE)
    return {path.name: training.sub("", path.read_text()) for path in base.iterdir()}


def test_a_task_has_as_many_threads_as_its_pod_requests_cpus():
    """Whatever machine renders: the bits of a run depend on its threads."""
    rendered = kubernetes.render(Request(), Place(cpus="5"))
    assert 5 == json.loads(rendered["records.yaml"][0]["data"]["config.json"])["threads"]


@pytest.mark.parametrize(
    ("request_", "place", "option"),
    [
        (Request(name="A_run"), Place(), "--name"),
        (Request(name="a" * 41), Place(), "--name"),
        (Request(), Place(kind="pod"), "--kind"),
        (Request(gpus_per_task=2, devices=3), Place(), "--devices"),
        (Request(nccl_debug="INFO"), Place(), "--nccl-debug"),
        (Request(memory="1MiB"), Place(), "--memory"),
        (Request(strategy="tpu"), Place(), "--strategy"),
        (Request(workers=4), Place(), "--global-batch"),
        (Request(), Place(cpus="0"), "--cpus"),
        (Request(), Place(image="two words"), "--image"),
        (Request(), Place(tensorboard_image="-board"), "--tensorboard-image"),
        (Request(), Place(claim="A_claim"), "--claim"),
        (Request(), Place(storage="20GiB"), "--storage"),
    ],
)
def test_what_cannot_be_rendered_is_refused(request_, place, option):
    with pytest.raises(UsageError, match=option):
        kubernetes.render(request_, place)


def test_help_lists_what_can_be_rendered_alone():
    command = [sys.executable, "-m", "invoke", "--help", "k8s.render"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "--gpus-per-task" in output
    assert not [name for name in kubernetes.NOT_RENDERED if f"--{name.replace('_', '-')}=" in output]
