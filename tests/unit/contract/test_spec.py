"""The cluster's description, and the TF_CONFIG of each task: what a topology gets, and what is refused."""

import contextlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contract import compatibility, spec, strategies, tf_config
from cluster.contract.spec import Role
from cluster.system.errors import UsageError


@pytest.mark.parametrize(
    ("workers", "ps", "devices", "expected", "replicas", "divisor"),
    [
        (0, 0, 1, "OneDeviceStrategy", 1, 1),
        (0, 0, 4, "MirroredStrategy", 4, 4),
        (2, 0, 1, "MultiWorkerMirroredStrategy", 3, 3),
        (2, 0, 2, "MultiWorkerMirroredStrategy", 6, 6),
        (2, 1, 1, "ParameterServerStrategy", 2, 1),  # the chief only coordinates; a step is one worker's
        (3, 2, 2, "ParameterServerStrategy", 6, 2),
    ],
)
def test_the_topology_chooses_the_strategy(workers, ps, devices, expected, replicas, divisor):
    cluster = spec.build(workers, ps, devices=devices)
    assert (expected, replicas, divisor) == (cluster.strategy_class, cluster.replicas, cluster.batch_divisor)


@pytest.mark.parametrize(
    ("strategy", "workers", "ps", "devices", "use"),
    [
        ("mirrored", 0, 0, 1, ""),
        ("central", 0, 0, 2, ""),
        ("one", 0, 0, 2, "--workers 0 --ps 0 --devices 1"),
        ("one", 1, 0, 1, "--workers 0 --ps 0 --devices 1"),
        ("mirrored", 2, 0, 1, "--workers 0 --ps 0"),
        ("central", 2, 1, 1, "--workers 0 --ps 0"),
        ("multiworker", 0, 0, 1, "--workers 1 or more and --ps 0"),
        ("multiworker", 2, 1, 1, "--workers 1 or more and --ps 0"),
        ("ps", 2, 0, 1, "--workers 1 or more and --ps 1 or more"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_with_what_would(strategy, workers, ps, devices, use):
    with pytest.raises(UsageError, match=f"--strategy {strategy} .*use {use}") if use else contextlib.nullcontext():
        assert strategy == spec.build(workers, ps, strategy=strategy, devices=devices).strategy


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"workers": value}, "--workers") for value in ("-1", "2.5", "two", "10000", "", "9" * 5000)),
        ({"ps": "-1"}, "--ps"),
        ({"devices": "0"}, "--devices"),
        ({"workers": 0, "ps": 1}, "--ps 1"),
        ({"strategy": "mutliworker"}, "'multiworker'"),
        ({"strategy": "xyz"}, "known: auto, "),
    ],
)
def test_what_cannot_be_a_cluster_is_refused(options, named):
    with pytest.raises(UsageError, match=named):
        spec.build(**options)


def test_tasks_are_named_after_role_and_index():
    cluster = spec.build(2, 1, evaluator=True)
    assert ["chief", "worker-0", "worker-1", "ps-0", "evaluator"] == [task.name for task in cluster.tasks]
    assert "worker-1:2222" == cluster.task("worker-1").address
    assert ["worker-0", "worker-1"] == [task.name for task in cluster.of(Role.WORKER)]
    with pytest.raises(UsageError, match="'worker-1'"):
        cluster.task("worker-2")
    cluster = spec.build(1, evaluator=True)
    assert ["chief", "worker-0"] == [task.name for task in cluster.members]
    assert (2, ()) == (cluster.replicas, spec.build(0, evaluator=True).members)
    local = spec.build(1, 1).listening((7001, 7002, 7003))
    assert ["127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003"] == [task.address for task in local.tasks]
    assert (1, 3) == tuple(each.tasks_on_host(each.task("chief")) for each in (cluster, local))


@pytest.mark.parametrize(
    ("topology", "alone", "serving", "calls"),
    [
        ({"workers": 0, "evaluator": True}, ["evaluator"], [], {}),
        ({"workers": 2}, [], [], {"worker-0": ["chief"], "worker-1": ["chief"]}),
        ({"workers": 1, "ps": 1}, ["worker-0"], ["worker-0", "ps-0"], {"chief": ["worker-0", "ps-0"]}),
    ],
)
def test_who_restarts_alone_who_only_serves_and_who_calls_whom_first(topology, alone, serving, calls):
    cluster = spec.build(**topology)
    assert alone == [task.name for task in cluster.tasks if cluster.restarts_alone(task)]
    assert serving == [task.name for task in cluster.tasks if cluster.serves(task)]
    called = {task.name: [other.name for other in cluster.calls_first(task)] for task in cluster.tasks}
    assert calls == {name: others for name, others in called.items() if others}


VALID = ["a", "fashion_mnist-20260101-101010", "A.b-c_9", "x" * 63]
INVALID = ["", "a/b", "../up", ".hidden", "-x", "a b", "ä", "x" * 64, "a\n", "$HOME"]


@pytest.mark.parametrize("name", [*VALID, *INVALID])
def test_a_run_name_is_what_a_folder_and_a_compose_project_allow(name):
    with contextlib.nullcontext() if name in VALID else pytest.raises(UsageError, match=re.escape(repr(name))):
        assert name == spec.check_run_name(name)


@settings(deadline=None)  # others use this machine, too
@given(st.integers(1, 10**6), st.integers(1, 600))
def test_the_offered_global_batches_divide(global_batch, divisor):
    if global_batch % divisor == 0:
        compatibility.check_global_batch(global_batch, divisor)
        return
    with pytest.raises(UsageError) as refused:
        compatibility.check_global_batch(global_batch, divisor)
    offered = str(refused.value).split("use ")[1].split(":")[0].split(" or ")
    assert all(int(batch) > 0 and int(batch) % divisor == 0 for batch in offered)
    assert all(abs(int(batch) - global_batch) < divisor for batch in offered)


@pytest.mark.parametrize(
    ("topology", "shares", "halves"),
    [
        ({"workers": 0}, True, True),
        ({"workers": 5}, True, True),
        ({"workers": 2, "devices": 2}, True, True),
        ({"workers": 6}, False, True),
        ({"workers": 1, "devices": 4}, False, True),
        ({"workers": 1, "ps": 1}, False, False),
        ({"workers": 0, "devices": 2, "strategy": "tpu"}, False, False),
    ],
)
def test_which_clusters_share_six_virtual_shards_and_train_in_float16(topology, shares, halves):
    cluster = spec.build(**topology)
    with contextlib.nullcontext() if shares else pytest.raises(UsageError, match="--bitwise-elastic 6"):
        compatibility.check_shards(cluster, 6)
    with contextlib.nullcontext() if halves else pytest.raises(UsageError, match="--precision fp16"):
        compatibility.check_precision(cluster, "fp16")
    for precision in set(strategies.PRECISIONS) - {"fp16"}:
        compatibility.check_precision(cluster, precision)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
def test_a_learning_rate_follows_the_global_batch_by_its_rule(rule, rate):
    assert pytest.approx(rate) == compatibility.scale_rate(0.1, rule, 4096, 256)
    assert 2e-3 == compatibility.scale_rate(2e-3, "none", 192, 7)  # to the bit


# TF_CONFIG: exactly what TensorFlow reads, for every topology


def test_a_worker_with_a_parameter_server_gets_exactly_this_text():
    cluster = spec.build(2, 1, evaluator=True)
    expected = (
        '{"cluster":{"chief":["chief:2222"],"worker":["worker-0:2222","worker-1:2222"],"ps":["ps-0:2222"]},'
        '"task":{"type":"worker","index":1}}'
    )
    assert expected == tf_config.dumps(cluster, cluster.task("worker-1"))


def test_tasks_keep_their_names_where_others_are_left_out_and_tensorflow_counts_those_that_are_there():
    cluster = spec.build(3).without({"worker-0", "worker-1"})
    expected = {
        # MultiWorkerMirroredStrategy would wait indefinitely for a `ps` that is listed.
        "cluster": {"chief": ["chief:2222"], "worker": ["worker-2:2222"]},
        "task": {"type": "worker", "index": 0},
    }
    assert expected == tf_config.render(cluster, cluster.task("worker-2"))
    alone = cluster.without({"worker-2"})
    assert None is tf_config.dumps(alone, alone.task("chief"))


@pytest.mark.parametrize(("task", "index"), [("chief", 0), ("worker-0", 1), ("worker-1", 2)])
def test_without_a_separate_chief_it_is_worker_0(task, index):
    cluster = spec.build(2, separate_chief=False)
    assert {
        "cluster": {"worker": ["chief:2222", "worker-0:2222", "worker-1:2222"]},
        "task": {"type": "worker", "index": index},
    } == tf_config.render(cluster, cluster.task(task))
    one, other = spec.build(2, 1, separate_chief=False), spec.build(2, 1)  # with parameter servers it always is
    assert [tf_config.render(other, task) for task in other.tasks] == [tf_config.render(one, t) for t in one.tasks]


@settings(deadline=None)  # others use this machine, too
@given(st.integers(1, 20), st.integers(0, 4), st.booleans())
def test_what_is_rendered_is_read_back(workers, ps, evaluator):
    described = spec.build(workers, ps, evaluator)
    for task in described.tasks:
        addresses, role, index = tf_config.parse(tf_config.dumps(described, task))
        assert (task.role, task.index) == (role, index)
        assert "evaluator" not in addresses
        assert [member.address for member in described.members] == [a for role in addresses.values() for a in role]
        if role != Role.EVALUATOR:
            assert task.address == addresses[role][index]


def text(address: str = "chief:2222", role: str = "chief", index: int = 0) -> str:
    return json.dumps({"cluster": {"chief": [address]}, "task": {"type": role, "index": index}})


@pytest.mark.parametrize(
    "value",
    [
        *("", "{", "[]", "{}", '{"cluster": {"chief": ["chief:2222"]}}'),
        *(text(role="boss"), text(index=1), text(role="worker")),
        *(text("chief"), text("chief:0"), text("chief:70000"), text("chief:http")),
    ],
)
def test_anything_else_is_refused_with_an_example(value):
    with pytest.raises(UsageError, match='expected {"cluster": {"chief": '):
        tf_config.parse(value)
    tf_config.parse(text())
