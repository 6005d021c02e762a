"""Rendered manifests: valid by the published schemas, with the names, codes and privileges that the docs promise.

The same options make the same text, and wrong ones are refused.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from cluster.contract import spec, tf_config
from cluster.contract.run import launch_records
from cluster.host import kubernetes
from cluster.host.kubernetes import NAME, Manifest
from cluster.host.options.request import Request
from cluster.system.errors import EXIT_DONE, UsageError
from cluster.system.files import ROOT
from tests.support.command_line import exit_code

CONFIG = {"dataset": "fashion_mnist", "source": "memory", "global_batch": 192}
KINDS = {kind: job for kind, (_, job) in kubernetes.KINDS.items()}


def manifest(
    kind: str, gpus: int = 0, name: str = "a-run", environment: dict[str, str] | None = None, **topology: Any
) -> Manifest:
    cluster = kubernetes.place_tasks(kind, spec.build(**topology), name)
    given = {"A": "$(B)"} if environment is None else environment
    return Manifest(name, cluster, CONFIG, {"max_restarts": 3}, "train:cpu", "claim", 2**32, 2, gpus, given)


@cache
def validator(kind: str) -> Draft202012Validator:
    schemas = json.loads(Path(__file__).with_name("schemas.json").read_text())
    return Draft202012Validator(schemas | {"$ref": f"#/$defs/{kind}"})


def expanded(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\$|\$\((\w+)\)", lambda match: values[match[1]] if match[1] else "$", text)


def environments(made: Manifest) -> dict[str, dict[str, str]]:
    """Return the variables of each pod of a JobSet, by its host name, as Kubernetes expands them."""
    found = {}
    for job in kubernetes.jobset(made)["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        for index in range(job["template"]["spec"]["completions"]):
            values: dict[str, str] = {}
            for variable in container["env"]:
                text = variable.get("value", str(index))  # only the index comes from elsewhere
                values[variable["name"]] = expanded(text, values)
            found[f"a-run-{job['name']}-0-{index}.a-run"] = values
    return found


@pytest.mark.slow
@given(
    kind=st.sampled_from(sorted(KINDS)),
    name=st.from_regex(NAME, fullmatch=True),
    workers=st.integers(1, 8),
    ps=st.integers(0, 8),
    evaluator=st.booleans(),
    gpus=st.integers(0, 8),
    environment=st.dictionaries(st.from_regex("[A-Z_]{1,9}", fullmatch=True), st.text(max_size=20), max_size=3),
)
@example(kind="jobset", name="c", workers=1, ps=0, evaluator=False, gpus=0, environment={"A": "1e100", "B": "0o7"})
@settings(deadline=None, max_examples=8)
def test_whatever_is_requested_is_valid_and_read_as_it_was_meant(kind, gpus, **requested):
    made = manifest(kind, gpus, **requested)
    parts = (kubernetes.records, kubernetes.network_policy, KINDS[kind], kubernetes.data_job)
    documents = [part(made) for part in parts]
    for document in documents:
        assert [] == list(validator(document["kind"]).iter_errors(document))
    assert len({(each["kind"], each["metadata"]["name"]) for each in documents}) == len(documents)
    assert documents == list(YAML(typ="safe").load_all(kubernetes.to_yaml(documents)))


@pytest.mark.parametrize(
    "topology",
    [
        {"workers": 0},
        {"workers": 1},
        {"workers": 64},
        {"workers": 2, "ps": 1},
        {"workers": 64, "ps": 8, "evaluator": True},
    ],
)
def test_each_pod_is_the_task_that_its_host_name_is_in_tf_config(topology):
    made = manifest("jobset", **topology)
    found = environments(made)
    assert {task.host: task.name for task in made.spec.tasks} == {host: each["TASK"] for host, each in found.items()}
    for task in made.spec.tasks:
        assert tf_config.dumps(made.spec, task) == found[task.host].get("TF_CONFIG")
        assert "$(B)" == found[task.host]["A"]


def test_host_names_of_the_largest_cluster_are_labels_of_dns():
    largest = spec.build(workers=512, ps=2, evaluator=True)
    for kind in KINDS:
        for task in kubernetes.place_tasks(kind, largest, "a" * 40).tasks:
            assert len(task.host.partition(".")[0] + "-abcde") <= 63


def test_the_records_are_those_of_a_run_folder():
    made = manifest("jobset", workers=1)
    data = kubernetes.records(made)["data"]
    assert made.spec == launch_records.cluster(json.loads(data["cluster.json"]))
    assert CONFIG == launch_records.config(json.loads(data["config.json"]))
    assert 3 == launch_records.Started.from_json(json.loads(data["started.json"])).max_restarts


GOLDEN = ROOT / "tests" / "unit" / "host" / "runtime" / "kubernetes" / "golden"
RENDERED = {
    "jobset": {"evaluator": True},
    "tfjob": {"workers": "2", "ps": "1", "gpus_per_task": "2", "image": "registry.example/train:gpu"},
}


@pytest.mark.usefixtures("resolved")
@pytest.mark.parametrize("kind", RENDERED)
def test_the_golden_manifests_are_what_is_rendered(capsys, kind):
    assert EXIT_DONE == exit_code("k8s.render", kind=kind, **RENDERED[kind])
    printed = capsys.readouterr()
    assert kubernetes.WARNING in printed.err
    # The training's configuration changes with every new setting.
    training = re.compile(r"^  config\.json: \|\n(    .*\n)+", re.MULTILINE)
    assert training.sub("", (GOLDEN / f"{kind}.yaml").read_text()) == training.sub("", printed.out)


@pytest.mark.usefixtures("resolved")
def test_data_is_prepared_by_a_separate_job():
    (job,) = kubernetes.render(Request(name="one"), data=True)
    assert ("Job", "one-data") == (job["kind"], job["metadata"]["name"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert ["python", "-m", "train.data", "prepare"] == container["command"]
    assert "--name=fashion_mnist" in container["args"]


def test_a_task_has_as_many_threads_as_its_pod_requests_cpus_and_options_of_env_and_min_workers_hold():
    """Whatever machine renders: the bits of a run depend on its threads."""
    rendered = kubernetes.render(Request(gpus_per_task=2, min_workers=1, env=("NCCL_DEBUG=INFO",)), cpus="5")
    assert 5 == json.loads(rendered[0]["data"]["config.json"])["threads"]
    started = json.loads(rendered[0]["data"]["started.json"])
    assert (1, False) == (started["min_workers"], started["grow"])
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
def test_what_cannot_be_rendered_is_refused(resolved, request_, place, option):
    with pytest.raises(UsageError, match=option):
        kubernetes.render(request_, **place)
