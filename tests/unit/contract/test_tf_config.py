"""TF_CONFIG: exactly what TensorFlow reads, for every topology."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contract import spec, tf_config
from cluster.contract.spec import Role
from cluster.system.errors import UsageError


def test_a_worker_beside_a_parameter_server_gets_this_very_text():
    cluster = spec.build(2, 1, evaluator=True)
    expected = (
        '{"cluster":{"chief":["chief:2222"],"worker":["worker-0:2222","worker-1:2222"],"ps":["ps-0:2222"]},'
        '"task":{"type":"worker","index":1}}'
    )
    assert expected == tf_config.dumps(cluster, cluster.task("worker-1"))


@pytest.mark.parametrize("evaluator", [False, True])
def test_the_chief_alone_gets_none(evaluator):
    cluster = spec.build(0, evaluator=evaluator)
    assert [None] * len(cluster.tasks) == [tf_config.dumps(cluster, task) for task in cluster.tasks]


def test_tasks_keep_their_names_where_others_are_left_out_and_tensorflow_counts_those_that_are_there():
    cluster = spec.build(3).without({"worker-0", "worker-1"})
    expected = {
        # MultiWorkerMirroredStrategy would wait indefinitely for a `ps` that is listed.
        "cluster": {"chief": ["chief:2222"], "worker": ["worker-2:2222"]},
        "task": {"type": "worker", "index": 0},
    }
    assert expected == tf_config.render(cluster, cluster.task("worker-2"))
    alone = cluster.without({"worker-2"})
    assert None is tf_config.render(alone, alone.task("chief"))


@pytest.mark.parametrize(("task", "index"), [("chief", 0), ("worker-0", 1), ("worker-1", 2)])
def test_without_a_separate_chief_it_is_worker_0(task, index):
    cluster = spec.build(2, separate_chief=False)
    assert {
        "cluster": {"worker": ["chief:2222", "worker-0:2222", "worker-1:2222"]},
        "task": {"type": "worker", "index": index},
    } == tf_config.render(cluster, cluster.task(task))
    one, other = spec.build(2, 1, separate_chief=False), spec.build(2, 1)  # with parameter servers it always is
    assert [tf_config.render(other, task) for task in other.tasks] == [tf_config.render(one, t) for t in one.tasks]


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
