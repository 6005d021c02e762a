"""Authenticated frames: who does not know the token, or changes, repeats or cuts a message, is refused."""

import pytest

from cluster.system.connection import LENGTH_BYTES, MAX_BYTES, MAX_HANDSHAKE_BYTES, Channel, Refused

TOKEN = "a token of the run"


def taken(channel: Channel) -> bytes:
    data = bytes(channel.unsent)
    channel.unsent.clear()
    return data


def established() -> tuple[Channel, Channel]:
    hub, agent = Channel(TOKEN), Channel(TOKEN, "worker-0")
    for sender, receiver in ((hub, agent), (agent, hub), (hub, agent)):
        assert TOKEN.encode() not in sender.unsent
        assert [] == receiver.receive(taken(sender))
    assert hub.established
    assert agent.established
    assert "worker-0" == hub.task
    return hub, agent


def frames(*messages: int) -> tuple[Channel, list[bytes]]:
    hub, agent = established()
    sent = []
    for message in messages:
        agent.send({"number": message})
        sent.append(taken(agent))
    return hub, sent


def test_messages_go_both_ways_and_the_token_is_never_sent():
    hub, agent = established()
    agent.send({"beat": None})
    agent.send({"beat": {"step": 1}})
    assert [{"beat": None}, {"beat": {"step": 1}}] == hub.receive(taken(agent))
    hub.send({"number": 3})
    assert [{"number": 3}] == agent.receive(taken(hub))


def test_torn_frames_are_put_together():
    hub, sent = frames(1, 2)
    whole = b"".join(sent)
    found = [message for at in range(len(whole)) for message in hub.receive(whole[at : at + 1])]
    assert [{"number": 1}, {"number": 2}] == found


@pytest.mark.parametrize("wrong", ["", "another token"])
def test_neither_side_takes_another_token(wrong):
    hub, stranger = Channel(TOKEN), Channel(wrong, "worker-0")
    stranger.receive(taken(hub))
    with pytest.raises(Refused):
        hub.receive(taken(stranger))
    assert not hub.established
    assert b"" == taken(hub)  # it proves nothing to a stranger
    stranger, agent = Channel(wrong), Channel(TOKEN, "worker-0")
    agent.receive(taken(stranger))
    with pytest.raises(Refused):
        agent.receive((32).to_bytes(LENGTH_BYTES, "big") + bytes(32))
    assert not agent.established


def test_a_proof_that_was_overheard_opens_nothing():
    hub, agent = Channel(TOKEN), Channel(TOKEN, "worker-0")
    agent.receive(taken(hub))
    proof = taken(agent)
    with pytest.raises(Refused):
        Channel(TOKEN).receive(proof)  # another connection has another nonce


def test_a_proof_is_not_reflected():
    """A stranger that listens in the hub's place sends the agent's own proof back."""
    agent = Channel(TOKEN, "worker-0")
    agent.receive(taken(Channel(TOKEN)))
    proof = taken(agent)[LENGTH_BYTES + 32 :][:32]
    with pytest.raises(Refused):
        agent.receive(len(proof).to_bytes(LENGTH_BYTES, "big") + proof)


def test_an_agent_cannot_take_another_task_s_name():
    hub, agent = Channel(TOKEN), Channel(TOKEN, "worker-0")
    agent.receive(taken(hub))
    with pytest.raises(Refused):
        hub.receive(taken(agent).replace(b"worker-0", b"worker-1"))


@pytest.mark.parametrize(
    "received",
    [
        lambda first, second: first + first,
        lambda first, second: second,
        lambda first, second: frames(1)[1][0],  # of another connection
        lambda first, second: first.replace(b'"number":1', b'"number":2'),
    ],
    ids=["repeated", "left out", "from another connection", "changed"],
)
def test_a_message_that_is_not_the_next_of_its_connection_is_refused(received):
    hub, sent = frames(1, 2)
    with pytest.raises(Refused):
        hub.receive(received(*sent))


def test_a_message_is_not_reflected():
    hub, agent = established()
    agent.send({"number": 1})
    with pytest.raises(Refused):
        agent.receive(taken(agent))
    assert hub.established


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b"[" * 100_000])
def test_an_invalid_message_is_refused(body):
    hub, agent = established()
    agent._put(agent._mac_of(body, by_server=False) + body)
    with pytest.raises(Refused):
        hub.receive(taken(agent))


def test_a_long_frame_is_refused_before_it_is_kept():
    for channel, limit in ((Channel(TOKEN), MAX_HANDSHAKE_BYTES), (established()[0], MAX_BYTES)):
        with pytest.raises(Refused):
            channel.receive((limit + 1).to_bytes(LENGTH_BYTES, "big"))
