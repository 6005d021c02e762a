"""Which configurations a cluster can train with: what is refused, and with which advice."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.contract import compatibility, spec, strategies
from cluster.system.errors import UsageError


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
