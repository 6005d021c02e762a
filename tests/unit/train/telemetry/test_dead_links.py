"""A task that waits finds the neighbours that no connection reaches, and only those."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from cluster.contract import spec
from cluster.contract.results.late_tasks import WAIT_S
from cluster.contract.run.records import Place, Position
from cluster.contract.spec import ClusterSpec
from cluster.system.ports import free_ports
from tests.support.waiting import wait_for
from train.telemetry.positions import Links

WAITING = Position(place=Place.EXCHANGE, step=7, left=False, seconds=WAIT_S)


@contextlib.contextmanager
def listener(*, answers: bool) -> Iterator[int]:
    """Yield a port that accepts connections, or one on which the system drops the packets that would open one."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16 if answers else 0))
        port = server.getsockname()[1]
        for _ in range(0 if answers else 4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield port


@pytest.fixture
def ring() -> Iterator[ClusterSpec]:
    """A chief and four workers: no answer from worker-1, no listener at worker-2 and worker-3."""
    with listener(answers=True) as live, listener(answers=False) as dead:
        ports = dict(zip(("chief", "worker-0", "worker-1"), (live, live, dead), strict=True))
        built = spec.build(workers=4)
        ended = free_ports(1)[0]
        tasks = [replace(task, host="127.0.0.1", port=ports.get(task.name, ended)) for task in built.tasks]
        yield replace(built, tasks=tuple(tasks))


@pytest.mark.parametrize(
    ("name", "found"), [("worker-0", ("worker-1",)), ("worker-2", ("worker-1",)), ("worker-3", ()), ("chief", ())]
)
def test_only_a_neighbour_that_no_connection_reaches_is_unreachable(ring, name, found):
    links = Links(ring, ring.task(name))
    assert () == links.examine(replace(WAITING, seconds=0.0)).unreachable
    if found:
        wait_for(lambda: found == links.examine(WAITING).unreachable, "the dead link is found")
        assert () == links.examine(replace(WAITING, left=True)).unreachable
        return
    links.examine(WAITING)
    for thread in links._threads.values():
        thread.join()
    assert () == links.examine(WAITING).unreachable


def test_a_task_that_can_start_no_thread_still_has_its_position(ring, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert () == Links(ring, ring.task("worker-0")).examine(WAITING).unreachable


def test_a_task_without_others_has_no_links():
    alone = spec.build(workers=0)
    assert () == Links(alone, alone.task("chief")).examine(WAITING).unreachable
