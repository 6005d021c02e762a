"""The rendezvous: it is complete when everybody answers everybody, and otherwise ends in time saying who is missing."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from cluster.agent import rendezvous
from cluster.contract import spec
from cluster.contract.spec import ClusterSpec, Task
from cluster.system import connection
from cluster.system.errors import EXIT_TIMEOUT, TimedOut
from cluster.system.ports import free_ports
from tests.support.waiting import wait_for


@pytest.fixture
def three() -> ClusterSpec:
    """A chief and two workers."""
    return spec.build(2).listening(free_ports(3))


def arrive(
    cluster: ClusterSpec, name: str, token: str = "run/0", timeout_s: float = 8, **more: Any
) -> futures.Future[None]:
    """Have a task come to the rendezvous, in a separate thread."""
    come = partial(rendezvous.hold_rendezvous, cluster, cluster.task(name), token=token, timeout_s=timeout_s, **more)
    return futures.ThreadPoolExecutor(1).submit(come)


@contextlib.contextmanager
def listening(cluster: ClusterSpec, name: str, says: bytes = b"") -> Iterator[socket.socket]:
    """Another program listens on a task's address, and answers each connection alike."""
    with socket.create_server(("127.0.0.1", cluster.task(name).port)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(says)
                        connection.shutdown(socket.SHUT_WR)
                        connection.recv(4096)

        threading.Thread(target=answer, daemon=True).start()
        yield server
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def test_who_has_met_an_earlier_attempt_need_not_answer_this_one(three):
    back = arrive(three, "worker-0", passed=lambda: frozenset({"chief", "worker-0"}))
    assert [None, None] == [
        arrival.exception(10) for arrival in (back, arrive(three, "worker-1", passed=lambda: frozenset({"chief"})))
    ]


def test_nobody_passes_before_the_last_has_come_and_then_all_free_their_ports(three):
    early = [arrive(three, "chief"), arrive(three, "worker-0")]
    assert not futures.wait(early, 0.5, futures.FIRST_COMPLETED).done
    assert [None] * 3 == [arrival.exception(10) for arrival in [*early, arrive(three, "worker-1")]]
    for task in three.tasks:  # TensorFlow's servers come next
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", task.port))


def test_the_chief_alone_does_not_wait():
    cluster = spec.build(0, evaluator=True)
    rendezvous.hold_rendezvous(cluster, cluster.task("chief"), token="run/0", timeout_s=0)


def test_a_missing_task_is_named_with_what_else_is_known(three):
    here = [
        arrive(three, name, timeout_s=0.5, explain=lambda name: f"{name}: exit code 1")
        for name in ("chief", "worker-0")
    ]
    for error in (arrival.exception(10) for arrival in here):
        assert isinstance(error, TimedOut)
        assert EXIT_TIMEOUT == error.exit_code
        reason = f"nothing listens on {three.task('worker-1').address}; worker-1: exit code 1"
        assert f"the cluster was not complete after 0.5 s: missing worker-1 ({reason})" == str(error)


def test_a_task_that_stopped_answering_is_named_instead_of_one_that_waits_for_it(three, monkeypatch):
    monkeypatch.setattr(rendezvous, "LAST_TRY_S", 0.5)
    ended, left = threading.Event(), threading.Event()
    waits = {"token": "run/0", "abandon": ended.is_set}  # it answers, and dials nobody
    threading.Thread(target=rendezvous.await_turn, args=[three.task("chief")], kwargs=waits, daemon=True).start()

    def patience(absent: frozenset[str]) -> float:
        if absent == {"chief"}:
            left.set()
        return 1.0

    leaves, stays = arrive(three, "worker-0", abandon=left.is_set), arrive(three, "worker-1", patience=patience)
    assert isinstance(leaves.exception(10), rendezvous.Abandoned)
    error = stays.exception(10)
    ended.set()
    assert isinstance(error, rendezvous.Incomplete)
    assert {"worker-0"} == error.missing


def test_a_name_that_does_not_resolve_is_distinguished(three, monkeypatch):
    moved = tuple(replace(task, host="gone") if task.name == "worker-1" else task for task in three.tasks)
    connect = socket.create_connection

    def resolve(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "gone":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return connect(address, timeout)

    monkeypatch.setattr(connection.socket, "create_connection", resolve)
    error = arrive(replace(three, tasks=moved), "chief", timeout_s=0.5).exception(10)
    assert "worker-1 (the name gone does not resolve)" in str(error)
    assert f"worker-0 (nothing listens on {three.task('worker-0').address})" in str(error)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers with something else"),
        (b"", "is not worker-0 of this generation"),
        (b"\0\0\0\x20" + bytes(32), "is not worker-0 of this generation"),  # a nonce, and no proof follows
        (b"\0\0\0\x20" + bytes(32) + b"\0\0\0\x20" + bytes(32), "answers with something else"),  # a wrong proof
    ],
)
def test_somebody_else_on_a_task_s_address_is_not_that_task(says, message):
    cluster = spec.build(1).listening(free_ports(2))
    with listening(cluster, "worker-0", says):
        error = arrive(cluster, "chief", timeout_s=0.4).exception(10)
    assert f"worker-0 ({cluster.task('worker-0').address} {message}" in str(error)


def test_a_task_that_cannot_be_reached_is_not_called_missing_by_itself(monkeypatch):
    monkeypatch.setattr(rendezvous, "LAST_TRY_S", 0.2)
    cluster = spec.build(1).listening(free_ports(2))
    worker = cluster.task("worker-0")
    listener = rendezvous.open_task_listener(worker, timeout_s=5, abandon=lambda: False, report=lambda obstacle: None)
    answering = rendezvous._Answering(listener, worker, "run/0", set())
    error = arrive(cluster, "chief", timeout_s=0.4).exception(10)
    answering.close()
    assert "worker-0 (answers, but cannot reach this task)" in str(error)


@pytest.mark.parametrize("patience", [{"timeout_s": 0.4}, {"timeout_s": 0.0, "patience": lambda absent: 0.4}])
def test_a_port_that_stays_taken_is_an_error_in_the_end(three, patience):
    reported: list[str] = []
    with listening(three, "worker-0"):
        arrival = arrive(three, "worker-0", report=reported.append, **patience)
        assert not futures.wait([arrival], 0.3).done
        error = arrival.exception(10)
    assert isinstance(error, rendezvous.PortTaken)
    port = three.task("worker-0").port
    assert f"worker-0 cannot listen on {three.task('worker-0').address}: Address already in use" in str(error)
    assert f"ss -ltnp 'sport = :{port}'" in str(error)
    assert [str(error)] == reported


def test_a_port_is_waited_for_until_its_holder_has_ended():
    cluster = spec.build(1).listening(free_ports(2))
    taken, reported = threading.Event(), []

    def report(obstacle: str) -> None:
        reported.append(bool(obstacle))
        taken.set()

    with listening(cluster, "worker-0"):
        arrived = arrive(cluster, "worker-0", report=report)
        assert taken.wait(20)
    assert [None, None] == [arrival.exception(10) for arrival in (arrive(cluster, "chief"), arrived)]
    assert [True, False] == reported


def test_who_does_not_know_the_token_cannot_pass_as_a_task(three):
    chief = arrive(three, "chief", timeout_s=1)
    for token in ("run/1", "name/0", "run/0 worker-0", ""):
        assert rendezvous.dial(three.task("worker-0"), three.task("chief"), token, 5)
    error = chief.exception(10)
    assert isinstance(error, rendezvous.Incomplete)
    assert {"worker-0", "worker-1"} == error.missing


def test_an_answer_of_another_task_does_not_count(three):
    chief = arrive(three, "chief", timeout_s=1)
    moved = replace(three.task("worker-1"), port=three.task("chief").port)
    wait_for(lambda: "is not worker-1" in rendezvous.dial(three.task("worker-0"), moved, "run/0", 5), "the chief")
    assert isinstance(chief.exception(10), rendezvous.Incomplete)


def test_a_server_that_speaks_http2_is_there(three):
    with listening(three, "chief", b"\0\0\0\4"):
        assert rendezvous.await_servers([three.task("chief")], timeout_s=5, abandon=lambda: False)


def test_the_barrier_s_own_listener_is_not_a_server(three):
    over = threading.Event()
    chief = arrive(three, "chief", abandon=over.is_set)
    assert not rendezvous.await_servers([three.task("chief")], timeout_s=0.5, abandon=lambda: False)
    assert not chief.done()
    over.set()
    chief.exception(10)


def test_waiting_for_a_server_ends_where_it_lost_its_purpose(three):
    began = time.monotonic()
    assert not rendezvous.await_servers(
        [three.task("chief")], timeout_s=600, abandon=lambda: time.monotonic() > began + 0.1
    )
    assert time.monotonic() < began + 300


def test_a_task_that_has_not_its_address_yet_tries_again(three, monkeypatch):
    tries: list[int] = []
    bind = socket.socket.bind

    class Flapping(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            if address[1] == three.task("chief").port and len(tries) < 2:
                tries.append(1)
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            bind(self, address)

    monkeypatch.setattr(rendezvous.socket, "socket", Flapping)
    assert [None] * 3 == [
        arrival.exception(10) for arrival in [arrive(three, name) for name in ("chief", "worker-0", "worker-1")]
    ]
    assert 2 == len(tries)


def test_a_task_that_never_gets_its_address_is_reported_in_time(three):
    lost = replace(three, tasks=(replace(three.task("chief"), host="192.0.2.1"), *three.tasks[1:]))
    error = arrive(lost, "chief", timeout_s=0.3).exception(10)
    assert isinstance(error, TimedOut)
    assert "chief cannot listen on 192.0.2.1" in str(error)
    assert "on the cluster's network?" in str(error)


@dataclass
class Report:
    """A task's connection to a hub."""

    tasks_absent: set[str] | None
    name: str = ""
    hub_is_current: bool = True

    def join_rendezvous(self, _number: int) -> None:
        if self.tasks_absent is not None:
            self.tasks_absent.discard(self.name)

    def absent(self, _number: int) -> frozenset[str] | None:
        return None if self.tasks_absent is None else frozenset(self.tasks_absent)


def everybody(cluster: ClusterSpec) -> set[str]:
    return {task.name for task in cluster.members}


def test_where_a_hub_is_heard_each_greets_two(monkeypatch):
    cluster = spec.build(7).listening(free_ports(8))
    absent, dial, dialed = everybody(cluster), rendezvous.dial, set()

    def note(task: Task, other: Task, *words: object) -> str:
        dialed.add((task.name, other.name))
        return dial(task, other, *words)

    monkeypatch.setattr(rendezvous, "dial", note)
    arrivals = [arrive(cluster, task.name, view=Report(absent, task.name)) for task in cluster.tasks]
    assert [None] * 8 == [arrival.exception(10) for arrival in arrivals]
    assert len(dialed) <= 2 * 8


MANY = frozenset(f"worker-{number}" for number in range(39))


@pytest.mark.parametrize(
    ("number", "heard", "absent", "waited_s", "greets_all"),
    [
        (rendezvous.SMALL + 1, False, None, 1.0, True),
        (rendezvous.SMALL + 2, False, None, 1.0, False),  # its connection to the hub is being made
        (rendezvous.SMALL + 2, False, None, rendezvous.HUB_S, True),
        (40, True, None, 29.0, False),  # many have not started yet: to greet all of them would only delay them
        (40, True, None, 30.0, True),
        (40, False, None, 29.0, False),
        (40, False, None, 30.0, True),
        (40, True, MANY, 29.0, False),
        (40, True, MANY, 30.0, True),
    ],
)
def test_a_large_gang_greets_all_only_after_a_while(number, heard, absent, waited_s, greets_all):
    cluster = spec.build(number - 1)
    others = [task.name for task in cluster.members[1:]]
    attendance = rendezvous.Attendance("run/0", frozenset(others), Report(absent, hub_is_current=heard))
    first = rendezvous.dialed_first(cluster, cluster.members[0])
    assert (frozenset(others) if greets_all else first) == attendance.exchange(first, waited_s, 60.0)


def test_a_hub_that_falls_silent_for_a_moment_makes_nobody_greet_all():
    cluster = spec.build(rendezvous.SMALL + 1)
    others = frozenset(task.name for task in cluster.members[1:])
    hub = Report(None)
    attendance = rendezvous.Attendance("run/0", others, hub)
    first = rendezvous.dialed_first(cluster, cluster.members[0])
    attendance.exchange(first, 20.0, 60.0)
    hub.hub_is_current = False
    assert first == attendance.exchange(first, 19.0 + rendezvous.HUB_S, 60.0)
    assert others == attendance.exchange(first, 20.0 + rendezvous.HUB_S, 60.0)


def test_those_who_are_still_absent_at_the_hub_are_greeted_if_they_are_few():
    cluster = spec.build(39)
    first, absent = rendezvous.dialed_first(cluster, cluster.members[0]), {"worker-7", "worker-9"}
    others = frozenset(task.name for task in cluster.members[1:])
    attendance = rendezvous.Attendance("run/0", others, Report(absent))
    assert first == attendance.exchange(first, rendezvous.GATHER_S - 1, 60.0)
    assert first | absent == attendance.exchange(first, rendezvous.GATHER_S, 60.0)


def test_who_does_not_hear_the_hub_is_let_in(three):
    absent = everybody(three)
    arrivals = [arrive(three, "worker-0"), *(arrive(three, n, view=Report(absent, n)) for n in ("chief", "worker-1"))]
    assert [None] * 3 == [arrival.exception(10) for arrival in arrivals]


def test_who_was_met_by_greetings_alone_says_so_to_the_hub_before_it_leaves(three, monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_S", 0.3)  # all is done while both sleep
    come: set[str] = set()
    names = ("chief", "worker-0")
    two = replace(three, tasks=three.tasks[:2])

    class Hub(Report):
        def join_rendezvous(self, _number: int) -> None:
            come.add(self.name)

    arrivals = [arrive(two, name, view=Hub(None, name)) for name in names]
    assert [None] * 2 == [arrival.exception(10) for arrival in arrivals]
    assert set(names) == come


def test_a_task_that_answers_is_not_missing():
    """worker-0 greets worker-2 only once it has met the silent worker-1, so that worker-2 waits for both."""
    cluster = spec.build(3).listening(free_ports(4))
    absent, names = everybody(cluster), ("chief", "worker-0", "worker-2")
    arrivals = [arrive(cluster, name, timeout_s=1, view=Report(absent, name)) for name in names]
    errors = [arrival.exception(10) for arrival in arrivals]
    assert [{"worker-1"}] * 3 == [error.missing for error in errors if isinstance(error, rendezvous.Incomplete)]
    reason = f"nothing listens on {cluster.task('worker-1').address}"
    assert [True] * 3 == [reason in str(error) for error in errors]


def test_whom_a_task_cannot_reach_it_names_although_the_hub_has_everybody(three):
    absent = everybody(three) - {"worker-1"}  # it has come, but its port is not to be reached
    error = arrive(three, "worker-0", timeout_s=1, view=Report(absent, "worker-0")).exception(10)
    assert isinstance(error, rendezvous.Incomplete)
    assert {"chief", "worker-1"} == error.missing
    assert "worker-0" in absent
