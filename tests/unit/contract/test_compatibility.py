"""Which configurations a cluster can train with: what is refused, and with which advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contract import compatibility, spec, strategies
from cluster.system.errors import UsageError


@pytest.mark.parametrize("source", ["memory", "stream"])
def test_data_workers_need_a_dataset_function(source):
    cluster = spec.build(1, data_workers=2)
    compatibility.check_data_workers(cluster, {"source": "function"})
    with pytest.raises(UsageError):
        compatibility.check_data_workers(cluster, {"source": source})
    compatibility.check_data_workers(spec.build(1), {"source": source})


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
    ("topology", "expected"),
    [
        ({"workers": 1, "ps": 1}, "--bitwise-elastic 6: ParameterServerStrategy is asynchronous; use another strategy"),
        ({"workers": 6}, "--bitwise-elastic 6: 7 replicas share 6 virtual shards, and each needs one; use "),
        ({"workers": 1, "devices": 4}, "--bitwise-elastic 6: 8 replicas share 6 virtual shards"),
    ],
)
def test_a_cluster_that_cannot_share_virtual_shards_is_refused(topology, expected):
    with pytest.raises(UsageError, match=f"^{expected}"):
        compatibility.check_shards(spec.build(**topology), 6)


@pytest.mark.parametrize("topology", [{"workers": 0}, {"workers": 3}, {"workers": 5}, {"workers": 2, "devices": 2}])
def test_any_number_of_replicas_up_to_theirs_can_share_virtual_shards(topology):
    compatibility.check_shards(spec.build(**topology), 6)


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ({"workers": 1, "ps": 1}, "ParameterServerStrategy has workers that would each change the one loss scale"),
        ({"workers": 0, "devices": 8, "strategy": "tpu"}, "TPUStrategy has no float16"),
    ],
)
def test_a_cluster_that_cannot_train_in_float16_is_refused(topology, expected):
    with pytest.raises(UsageError, match=f"^--precision fp16: {expected}; use --precision bf16$"):
        compatibility.check_precision(spec.build(**topology), "fp16")
    compatibility.check_precision(spec.build(**topology), "bf16")


@pytest.mark.parametrize("topology", [{"workers": 0}, {"workers": 2}, {"workers": 0, "devices": 2}])
def test_synchronous_clusters_train_in_any_precision(topology):
    for precision in strategies.PRECISIONS:
        compatibility.check_precision(spec.build(**topology), precision)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)])
def test_a_learning_rate_follows_the_global_batch_by_its_rule(rule, rate):
    assert pytest.approx(rate) == compatibility.scale_rate(0.1, rule, 4096, 256)


def test_without_a_rule_the_learning_rate_keeps_its_bits():
    assert 2e-3 == compatibility.scale_rate(2e-3, "none", 192, 7)
