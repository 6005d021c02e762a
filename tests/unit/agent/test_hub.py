"""The hub and its links over real sockets: what a board learns, and when it goes back to the folder."""

import contextlib
import select
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from cluster.agent import hub, run_view
from cluster.agent.hub import urgent
from cluster.agent.run_view import RunView
from cluster.contract.run import joining
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.records import AfterStop, Generation
from cluster.system import connection
from cluster.system.connection import Channel
from tests.support.beats import beat
from tests.support.waiting import wait_for


@pytest.fixture
def run(make_run) -> RunFolder:
    return make_run(workers=2)


@pytest.fixture
def join(run) -> Iterator[Callable[..., RunView]]:
    """Returns the board of a task that is connected to the others, of this run or of a copy."""
    boards = []

    def connect(name: str, folder: RunFolder = run) -> RunView:
        spec = folder.load_cluster()
        boards.append(RunView(RunFolder(folder.path)))
        boards[-1].connect(spec, spec.task(name), "127.0.0.1")
        _ = boards[-1].generation
        return boards[-1]

    yield connect
    for each in boards:
        each.disconnect()


@pytest.fixture
def blind(monkeypatch):
    """Agents that read the folder only where no hub is heard."""
    monkeypatch.setattr(run_view, "READ_S", 1000.0)


def linked(board: RunView) -> RunView:
    """Wait until a board hears the hub."""
    wait_for(lambda: board.is_relieved, "the hub")
    _ = board.generation, board.outcome, board.stop_requested  # read once
    return board


@pytest.mark.usefixtures("blind")
def test_what_the_chief_sees_all_learn(run, join):
    join("chief")
    worker = linked(join("worker-0"))
    run.request_stop("a user")
    wait_for(lambda: worker.stop_requested, "the stop request")
    run.withdraw_stop()
    run.begin_generation(1, left_out=["worker-1"])
    wait_for(lambda: worker.generation == 1, "the generation")
    assert {"worker-1"} == worker.generation_record(1).left_out
    run.end("succeeded", task="chief")
    assert "succeeded" == wait_for(lambda: worker.outcome, "the outcome").state


@pytest.mark.usefixtures("blind")
def test_what_an_agent_knows_all_learn_at_once_although_their_folders_do_not_show_it(run, join, monkeypatch):
    join("chief")
    worker, other = linked(join("worker-0")), linked(join("worker-1"))
    monkeypatch.setattr(hub, "TICK_S", 1000.0)
    other.bell.silence()
    worker.folder.learn(Generation(generation=1, time=1.0, pause_s=3.0))  # as if only its host's cache showed it
    assert worker.generation_record(1)
    assert 1 == worker.generation
    wait_for(lambda: other.generation == 1, "the generation")
    assert [other.bell] == select.select([other.bell], [], [], 0)[0]
    assert 3.0 == other.generation_record(1).pause_s
    assert 0 == run.generation


def test_the_newest_heartbeat_counts_whether_the_folder_or_the_hub_shows_it_first(run, join, monkeypatch):
    chief = join("chief")
    beats = []
    for state in ("training", "failed"):
        beat(run, "worker-0", state=state)
        beats.append(run.heartbeat("worker-0"))
        for sent in beats:
            monkeypatch.setattr(chief._hub, "beat", {"worker-0": sent}.get)
            assert state == chief.heartbeats()["worker-0"].state
    beat(run, "worker-0", state="training")
    monkeypatch.setattr(chief._hub, "beat", {"worker-0": replace(beats[1], updated_at=time.time())}.get)
    assert "failed" == chief.heartbeats()["worker-0"].state


@pytest.mark.usefixtures("blind")
def test_a_withdrawn_stop_does_not_stop_the_next_generation(run, join):
    join("chief")
    worker = linked(join("worker-0"))
    assert worker.request_stop("worker-0", then=AfterStop.SCALE)
    assert (0, True) == (worker.generation, worker.stop_requested)  # read in the folder before the hub reports it
    run.withdraw_stop()
    run.begin_generation(1)
    wait_for(lambda: worker.generation == 1 and worker.is_relieved, "the generation")
    assert not worker.stop_requested


def test_no_generation_begins_once_the_run_has_ended(run):
    run.end("stopped", task="chief")
    assert not RunView(run).begin_generation(1, task="worker-0")


def test_without_a_hub_the_folder_is_read_each_time(run, join, monkeypatch):
    monkeypatch.setattr(joining, "_listen", Mock(side_effect=OSError("no port")))
    boards = [join("chief"), join("worker-0")]
    assert [(0, None, False)] * 2 == [(each.generation, each.outcome, each.stop_requested) for each in boards]
    run.begin_generation(1)
    run.request_stop("a user")
    run.end("stopped", task="chief")
    assert [(1, True)] * 2 == [(each.generation, each.stop_requested) for each in boards]
    assert all(each.outcome and not each.hub_is_current for each in boards)


@pytest.mark.usefixtures("blind")
def test_a_hub_that_is_gone_is_noticed_at_once_and_found_again(run, join):
    chief = join("chief")
    worker = linked(join("worker-0"))
    before = joining.read_invitation(run)
    chief.disconnect()
    began = time.monotonic()
    wait_for(lambda: not worker.is_relieved, "the end of the connection")
    assert time.monotonic() - began < 1.0
    run.begin_generation(1)
    assert 1 == worker.generation
    join("chief")
    linked(worker)
    assert before == joining.read_invitation(run)  # whose port was free again


def test_between_hosts_the_hub_s_port_is_in_the_range_that_a_firewall_admits(run):
    chief = replace(run.load_cluster().task("chief"), host="127.0.0.2")
    listener, _ = joining.open_hub_listener(run, chief, chief.host)
    with listener:
        assert listener.getsockname()[1] in joining.PORTS


def test_a_frozen_hub_is_noticed_by_its_silence(run, join, monkeypatch):
    monkeypatch.setattr(hub, "SILENCE_S", 0.5)
    monkeypatch.setattr(hub, "PULSE_S", 0.1)
    chief = join("chief")
    worker = linked(join("worker-0"))
    with chief._hub._lock:
        wait_for(lambda: not worker.is_relieved, "that nothing is heard")
    linked(worker)


def test_only_the_owner_may_read_the_token(run, join):
    join("chief")
    assert 0o600 == stat.S_IMODE(run.token.stat().st_mode)
    token = joining.run_token(run)
    assert len(token) == 2 * joining.TOKEN_BYTES
    shown = [run.cluster, run.config, run.events_log, *run.path.glob("logs/*")]
    assert not any(token in each.read_text() for each in shown if each.exists())


def test_a_resumed_copy_shares_neither_token_nor_port_with_the_original(run, join):
    original = join("chief")
    linked(join("worker-0"))
    copy = RunFolder(run.path.with_name("copy"))
    shutil.copytree(run.path, copy.path)
    copy.reopen()
    assert joining.read_invitation(copy) is None
    assert joining.run_token(copy) != joining.run_token(run)
    join("chief", copy)
    worker = join("worker-1", copy)
    wait_for(lambda: worker.is_relieved, "the copy's own hub")
    assert not original.is_connected("worker-1")


def test_strangers_and_the_slow_keep_nobody_out(run, join, monkeypatch):
    monkeypatch.setattr(connection, "HANDSHAKE_S", 0.3)
    join("chief")
    found = joining.read_invitation(run)
    assert found
    strangers = [socket.create_connection((found.host, found.port)) for _ in range(connection.MAX_UNPROVED + 10)]
    brackets = b"[" * 4000 + b"\n"  # too deep for a JSON parser
    garbage = (b"GET / HTTP/1.1\r\n\r\n", brackets, b"\0\0\0\xff" + brackets, b"\xff\xff\n", b"\0")
    for stranger, data in zip(strangers, garbage, strict=False):  # the others send nothing
        stranger.sendall(data)
    linked(join("worker-0"))
    for each in strangers:
        each.settimeout(5)
        with each, contextlib.suppress(ConnectionError):
            while each.recv(4096):
                pass  # a timeout would fail the test


def test_a_peer_that_takes_nothing_is_closed_and_holds_up_nobody(run, join, monkeypatch):
    monkeypatch.setattr(hub, "PULSE_S", 0.0)
    monkeypatch.setattr(hub, "TICK_S", 0.01)
    monkeypatch.setattr(connection, "TICK_S", 0.01)
    monkeypatch.setattr(connection, "MAX_UNSENT", 500_000)
    chief = join("chief")
    found = joining.read_invitation(run)
    assert found
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((found.host, found.port))
        channel = Channel(joining.run_token(run), "worker-1")
        while not channel.established:
            channel.receive(slow.recv(4096))
            slow.sendall(channel.unsent)
            channel.unsent.clear()
        wait_for(lambda: chief._hub._peers, "the slow peer")
        run.end("failed", task="chief", error="x" * 60_000)  # so that digests are long
        worker = linked(join("worker-0"))
        wait_for(
            lambda: all(each.channel.task != "worker-1" for each in list(chief._hub._peers.values())),
            "the end of the slow connection",
            timeout_s=60,
        )
        wait_for(lambda: worker.is_relieved, "the hub")


def test_the_newest_connection_of_a_task_counts(run, join):
    chief = join("chief")
    first = linked(join("worker-0"))
    second = linked(join("worker-0"))
    wait_for(lambda: not first._link._thread.is_alive(), "the end of the first")  # which does not come back
    assert second.is_relieved
    run.request_stop("a user")
    assert first.stop_requested  # by the folder
    beat(run, "worker-0", step=7)
    assert 7 == wait_for(lambda: chief._hub.beat("worker-0"), "the heartbeat").step


def test_all_meet_by_the_hub(run, join):
    boards = [join("chief"), linked(join("worker-0")), linked(join("worker-1"))]
    wait_for(lambda: all(each.hub_is_current for each in boards), "the hub")
    for each in boards[:2]:
        each.join_rendezvous(0)
    for each in boards:
        wait_for(lambda each=each: each.absent(0) == {"worker-1"}, "who is absent")
    boards[2].join_rendezvous(0)
    for each in boards:
        wait_for(lambda each=each: each.absent(0) == frozenset(), "that all have come")
        assert each.absent(1) is None


@pytest.mark.parametrize(
    ("change", "waited_for"),
    [
        ({"absent": ["worker-1"]}, False),  # they come one by one: a message to all for each would be N^2
        ({"absent": []}, True),
        ({"unlinked": ["worker-1"]}, False),
        ({"number": 1}, True),
        ({"stop": {"by": "a user"}}, True),
        ({"outcome": {"state": "failed", "time": 1.0}}, True),
    ],
)
def test_only_what_others_wait_for_is_urgent(change, waited_for):
    digest = {"number": 0, "begun": None, "outcome": None, "stop": None, "unlinked": [], "absent": None}
    assert waited_for == (urgent(digest) != urgent(digest | change))
