"""`invoke explain`: every mistake of a TF_CONFIG is found, and none where there is none."""

import json

import pytest

from cluster.contract import spec, tf_config
from cluster.host.checks import explain
from cluster.system.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from tests.support.command_line import exit_code

TWO = {"worker": ["a:2222", "b:2222"]}


def text(cluster: object = TWO, role: object = "worker", index: object = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def found(value: str, strategy: str = "") -> set[tuple[str, str]]:
    return {(each.state, each.check) for each in explain.explain_text(value, "", strategy).findings}


WORKERS = {
    "address": ([7], ["a", "b:2222"], ["grpc://a:2222", "b:2222"]),
    "duplicate": (["a:2222", "A:2222"], ["localhost:2222", "127.0.0.1:2222"]),
    "localhost": (["localhost:2222", "b:2222"], ["0.0.0.0:2222", "b:2222"]),
    "port": (["a:0", "b:2222"], ["a:65536", "b:2222"]),
    "name": tuple([f"{name}:2222", "b:2222"] for name in ("-a", "a..b", "a" * 64, "10.0.0.300")),
}
MISTAKES = {
    "json": ["", "{", json.dumps(text()), "[" * 100_000, "7", str(json.loads(text())), f"export TF_CONFIG='{text()}'"],
    "cluster": ["{}", '{"cluster": []}', text({"worker": "a:2222"})],
    "task": ['{"cluster": {"worker": ["a:1234"]}}', text(index=None), text(index=2), text(role="chief")],
    "evaluator": [text(TWO | {"evaluator": ["e:2222"]})],
    "chief": [text(TWO | {"chief": ["c:2222", "d:2222"]})],
    "roles": [text({name: ["c:2222"]} | TWO) for name in ("wroker", "Worker", "master")],
    "strategy": [text({"ps": ["p:2222"], "chief": ["c:2222"]}, "chief"), text({"ps": ["p:2222"], **TWO})],
} | {check: [text({"worker": addresses}) for addresses in wrong] for check, wrong in WORKERS.items()}


@pytest.mark.parametrize(("value", "check"), [(value, check) for check in MISTAKES for value in MISTAKES[check]])
def test_a_mistake_is_found(value, check):
    assert ("failed", check) in found(value)


@pytest.mark.parametrize(
    ("cluster", "role"),
    [
        ({"chief": ["j-chief-0.ns.svc:2222"], "worker": ["j-worker-0.ns.svc:2222"]}, "chief"),
        ({"worker": ["algo-1:8890", "algo-2:8890"]}, "worker"),
        ({"worker": ["localhost:12345", "localhost:23456"]}, "worker"),
        ({"worker": ["[fd00::1]:2222", "10.0.0.2:2222", "c.example.org.:2222"]}, "worker"),
    ],
    ids=["TFJob", "SageMaker", "the tutorials", "several machines and IPv6"],
)
def test_what_others_write_is_right(cluster, role):
    theirs = {"cluster": cluster, "task": {"type": role, "index": 0}, "environment": "cloud", "rpc_layer": "grpc"}
    assert set() == found(json.dumps(theirs))


PS, CHIEF = {"ps": ["p:2222"]}, {"chief": ["c:2222"]}


@pytest.mark.parametrize(
    ("value", "strategy", "expected"),
    [
        (text(index="0"), "", {("warning", "task")}),
        (text({"worker": ["a:80", "b:2222"]}), "", {("warning", "port")}),
        (text({"worker": ["a_1:2222", "b:2222"]}), "", {("warning", "name")}),
        (text({"worker": {"0": "a:2222", "2": "b:2222"}}), "", {("warning", "roles")}),
        (text(TWO | CHIEF | PS), "", {("warning", "strategy")}),
        (text(TWO | CHIEF | PS), "ps", set()),
        (text(TWO | CHIEF | PS), "multiworker", {("failed", "strategy")}),
        (text(), "ps", {("failed", "strategy")}),
        (text(), "mirrored", {("failed", "strategy")}),
        (text(), "multiworker", set()),
    ],
)
def test_what_may_go_wrong_is_a_warning_and_a_known_strategy_must_fit(value, strategy, expected):
    assert expected == found(value, strategy)


@pytest.mark.parametrize(
    "topology", [{"workers": 2}, {"workers": 2, "ps": 2, "evaluator": True}, {"workers": 1, "separate_chief": False}]
)
def test_nothing_is_wrong_with_our_own(topology):
    cluster = spec.build(**topology)
    for task in cluster.tasks:
        assert set() == found(tf_config.dumps(cluster, task) or "", cluster.strategy)


def test_a_file_the_environment_and_a_run_are_explained(tmp_path, monkeypatch, make_run, capsys):
    (tmp_path / "tf_config.json").write_text(text(index=5))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EXIT_FAILED == exit_code("explain", file="~/tf_config.json")
    monkeypatch.setenv("TF_CONFIG", text())
    assert EXIT_DONE == exit_code("explain")
    make_run("one", workers=1)
    capsys.readouterr()
    assert EXIT_DONE == exit_code("explain", run="one", json=True)
    value = json.loads(capsys.readouterr().out)
    assert value["ok"]
    assert ["chief", "worker"] == [task["role"] for task in value["tasks"]]
    assert all(task["does"] for task in value["tasks"])


def test_options_of_up_are_explained_without_a_run(capsys):
    assert EXIT_DONE == exit_code("explain", workers="2", ps="1", evaluator=True)
    shown = capsys.readouterr().out
    assert "ParameterServerStrategy" in shown
    assert {"chief", "worker", "ps", "evaluator"} <= {line.split(" ")[0] for line in shown.splitlines()}


@pytest.mark.parametrize(
    "options",
    [
        {"file": "missing.json"},
        {"file": "x", "workers": "2"},
        {"workers": "x"},
        {"run": "none"},
        {"lint": True},
        {"workers": "1", "task": "ps-0"},
    ],
)
def test_what_cannot_be_explained_is_wrong_usage(options):
    assert EXIT_USAGE == exit_code("explain", **options)


def test_only_mistakes_are_shown_with_lint_and_nothing_steers_a_terminal(capsys):
    result = explain.explain_text(text({"worker": ["a\x1b[2J:2222", "b:2222"]}), "x")
    assert not result.ok
    assert len(result.findings) == len(result.lines(lint=True))
    assert "\x1b" not in "".join(result.lines(lint=False))
