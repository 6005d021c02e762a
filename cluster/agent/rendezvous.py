"""The rendezvous: every task of the cluster answers every other before TensorFlow is let in, or the start ends.

TensorFlow's own start waits for a missing task for ever and does not say which. Here each task listens on the very
address that TF_CONFIG gives its TensorFlow server, and greets every other task on theirs; so a name that does not
resolve, a closed port and a task that never came up are told apart, and the time is bounded.

A task passes when it has been answered by every other and every other has confirmed its answer. Both are needed: a
task that closed its listener after its own greetings alone would look missing to a slower one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO, TypedDict

from cluster.errors import ClusterError, TimedOut
from cluster.spec import ClusterSpec, Task

CONNECT_TIMEOUT_S = 2.0
POLL_S = 0.02
LEFT = "the rendezvous was left"
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What an HTTP/2 client says first: the preface, and settings of which there are none (RFC 9113, 3.4)."""


class PortTaken(ClusterError):
    """Another program listens on the task's port."""


class Abandoned(ClusterError):
    """The rendezvous was left because waiting lost its purpose: the run ended or a newer generation began."""


class Waiting(TypedDict):
    """How long a task waits, and what it does meanwhile.

    Attributes:
        timeout_s: seconds to wait for the others, and for this task's own port.
        abandon: asked again and again; a true answer leaves the rendezvous.
        report: told what keeps this task from listening, and the empty string once nothing does.
    """

    timeout_s: float
    abandon: Callable[[], bool]
    report: Callable[[str], None]


@dataclass
class _Meeting:
    """What one task knows of the others, filled by its listener and its greeter threads."""

    token: str
    missing: dict[str, str]
    """The tasks that have not answered, each with the last reason."""
    unconfirmed: set[str]
    """The tasks that have not confirmed our answer."""
    over: threading.Event = field(default_factory=threading.Event)


def wait(
    spec: ClusterSpec,
    task: Task,
    *,
    token: str,
    timeout_s: float,
    abandon: Callable[[], bool] = lambda: False,
    explain: Callable[[str], str] = lambda name: "",
    report: Callable[[str], None] = lambda obstacle: None,
) -> None:
    """Return once all of the cluster's members answer each other.

    Args:
        spec: the cluster.
        task: the member that calls.
        token: run name and generation; a task left over from an earlier life does not answer to it.
        timeout_s: seconds to wait for the others.
        abandon: asked again and again; a true answer leaves the rendezvous.
        explain: returns what else is known about a missing task, such as its exit code and last line.
        report: told what keeps this task from listening, and the empty string once nothing does.

    Raises:
        PortTaken: another program listened on this task's port all the time.
        Abandoned: `abandon` said so.
        TimedOut: somebody is missing; the message names each and why.
    """
    others = [member for member in spec.members if member.name != task.name]
    if not others:
        return
    meeting = _Meeting(token, {other.name: "not tried yet" for other in others}, {other.name for other in others})
    deadline = time.monotonic() + timeout_s
    listener = _listen(task, deadline, abandon, report)
    threads = [threading.Thread(target=_answer, args=(listener, task, meeting), daemon=True)]
    threads += [threading.Thread(target=_greet, args=(task, other, meeting), daemon=True) for other in others]
    for thread in threads:
        thread.start()
    try:
        while meeting.missing or meeting.unconfirmed:
            if abandon():
                raise Abandoned(LEFT)
            if time.monotonic() > deadline:
                raise TimedOut(_explain_missing(meeting, timeout_s, explain))
            time.sleep(POLL_S)
    finally:
        meeting.over.set()
        listener.close()
        for thread in threads:
            thread.join(CONNECT_TIMEOUT_S + 1)


def await_servers(tasks: Sequence[Task], *, timeout_s: float, abandon: Callable[[], bool]) -> bool:
    """Return once the TensorFlow servers of all these tasks listen; False where the time ran out or it was left.

    A gRPC client that comes a moment before its server waits for a second until it tries again. Asked in HTTP/2, which
    the listener of the rendezvous, perhaps still there, does not speak.
    """
    deadline = time.monotonic() + timeout_s
    left = list(tasks)
    while left and not abandon() and time.monotonic() < deadline:
        left = [task for task in left if not _speaks_http2(task)]
        if left:
            time.sleep(POLL_S)
    return not left


def _speaks_http2(task: Task) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((task.host, task.port), CONNECT_TIMEOUT_S) as asked:
        asked.settimeout(CONNECT_TIMEOUT_S)
        asked.sendall(_HTTP2_HELLO)
        return asked.recv(1) != b""
    return False


def _explain_missing(meeting: _Meeting, timeout_s: float, explain: Callable[[str], str]) -> str:
    told = []
    for name in sorted({*meeting.missing, *meeting.unconfirmed}):
        reason = meeting.missing.get(name, "answers, but cannot reach this task")
        told.append(f"{name} ({'; '.join(filter(None, [reason, explain(name)]))})")
    return f"the cluster was not complete after {timeout_s:g} s: missing {', '.join(told)}"


def await_own_port(task: Task, *, timeout_s: float, abandon: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Return once this task can listen on its address.

    Raises:
        PortTaken, Abandoned, TimedOut: as `wait`.
    """
    _listen(task, time.monotonic() + timeout_s, abandon, report).close()


def _listen(task: Task, deadline: float, abandon: Callable[[], bool], report: Callable[[str], None]) -> socket.socket:
    """Return the listener, as soon as this task has the address.

    A machine can be off its network for a while, and a program that was killed holds its port until the kernel has
    freed its memory.
    """
    obstacle = ""
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # In a container the task's own name is its only interface; on one machine everything is on loopback.
            listener.bind((task.host, task.port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if str(reason := _obstacle(task, error)) != obstacle:
                report(obstacle := str(reason))
            if time.monotonic() > deadline or not _can_pass(error):
                raise reason from error
            if abandon():
                raise Abandoned(LEFT) from error
            time.sleep(POLL_S)
        else:
            if obstacle:
                report("")
            listener.settimeout(POLL_S * 5)
            return listener


def _can_pass(error: OSError) -> bool:
    """Whether it is worth trying again to listen."""
    return isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def _obstacle(task: Task, error: OSError) -> ClusterError:
    """Return the error of a task that cannot listen, for when waiting does not help."""
    told = f"{task.name} cannot listen on {task.address}: {error.strerror or error}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return TimedOut(f"{told}; is this machine on the cluster's network?")
    port = f"ss -ltnp 'sport = :{task.port}'"
    return PortTaken(f"{told}; end the program that holds port {task.port} ({port} shows it) and start again")


def _answer(listener: socket.socket, task: Task, meeting: _Meeting) -> None:
    """Answer greetings until the meeting is over: hello, welcome, thanks."""
    while not meeting.over.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            try:
                stream = connection.makefile("rw")
                hello = json.loads(stream.readline(4096))
                same = hello["token"] == meeting.token
                _say(stream, {"task": task.name, "token": meeting.token})
                if same and json.loads(stream.readline(4096))["thanks"]:
                    meeting.unconfirmed.discard(hello["task"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # a port scan, or a task that died while it spoke; a live one greets again


def _greet(task: Task, other: Task, meeting: _Meeting) -> None:
    """Greet one other task until it has answered or the meeting is over."""
    while not meeting.over.is_set():
        try:
            with socket.create_connection((other.host, other.port), CONNECT_TIMEOUT_S) as connection:
                stream = connection.makefile("rw")
                _say(stream, {"task": task.name, "token": meeting.token})
                welcome = json.loads(stream.readline(4096))
                if welcome["task"] == other.name and welcome["token"] == meeting.token:
                    _say(stream, {"thanks": True})
                    meeting.missing.pop(other.name, None)
                    return
                reason = f"{other.address} is {welcome['task']} of {welcome['token']}, not of {meeting.token}"
        except socket.gaierror:
            reason = f"the name {other.host} does not resolve"
        except ConnectionRefusedError:
            reason = f"nothing listens on {other.address}"
        except TimeoutError:
            reason = f"{other.address} does not answer"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{other.address} answers with something else: {error or type(error).__name__}"
        meeting.missing[other.name] = reason
        meeting.over.wait(POLL_S * 5)


def _say(stream: TextIO, words: dict[str, object]) -> None:
    stream.write(json.dumps(words) + "\n")
    stream.flush()
