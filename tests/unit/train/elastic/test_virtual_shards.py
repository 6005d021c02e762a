"""How virtual shards are dealt out to replicas."""

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from train.elastic.virtual_shards import VirtualShards


@st.composite
def cuts(draw: st.DrawFn) -> VirtualShards:
    total = draw(st.integers(1, 40))
    return VirtualShards(total, draw(st.integers(1, total)))


@settings(deadline=None, max_examples=100)
@given(cuts())
def test_each_shard_must_be_one_replicas_and_none_may_have_two_more_than_another(cut):
    shares = [list(range(cut.first(replica), cut.first(replica + 1))) for replica in range(cut.replicas)]
    assert list(range(cut.total)) == [shard for share in shares for shard in share]
    assert {cut.most, cut.total // cut.replicas} == {len(share) for share in shares} | {cut.most}


@settings(deadline=None, max_examples=20)
@given(cuts())
def test_a_graph_must_find_the_same_shards(cut):
    for replica in range(cut.replicas):
        shards = cut.list_shards(tf.constant(replica, tf.int64)).numpy().tolist()
        assert list(range(cut.first(replica), cut.first(replica + 1))) == shards
        places = [int(cut.place(tf.constant(shard, tf.int64))) for shard in shards]
        assert list(range(len(shards))) == places
