"""The requirements of a run, checked by a task on a host: `invoke doctor --runtime slurm` and `--runtime swarm`.

    python -m cluster.agent.schedulers.probe

The environment has RUN_DIR, DATA_DIR, TASK and NODE. The task of each host writes its findings into
the run's folder, or in Slurm prints them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cluster.agent import rendezvous
from cluster.contract.run import joining
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import ClusterSpec, Task
from cluster.system.errors import ClusterError
from cluster.system.json_files import write_json

REACH_S = 20.0
"""How long hosts get to reach each other, and to measure."""
CHUNK, CHUNKS = bytes(2**20), 64
"""The data to measure bandwidth: 64 MiB."""
POLL_S = 0.05


@dataclass(frozen=True)
class Link:
    """How a host reaches another.

    Attributes:
        skew_s: how far the other's clock is ahead.
        mb_per_s: megabytes that it receives in a second.
    """

    skew_s: float
    mb_per_s: float


def main() -> int:
    """Write the findings about this host into the run's folder."""
    run, name = RunFolder(Path(os.environ["RUN_DIR"])), os.environ["TASK"]
    cluster = run.load_cluster()
    write_json(run.probe(name), examine(run, cluster, cluster.task(name), os.environ["NODE"]))
    return 0


def examine(run: RunFolder, cluster: ClusterSpec, task: Task, node: str) -> dict[str, Any]:
    """Return whether this host sees the data, why it cannot reach the others, and its link to one."""
    found, others = alone(node), [member for member in cluster.tasks if member.name != task.name]
    if not others:
        return found
    try:
        marks = [run.control / "check" / f"{member.name}.mark" for member in others]
        [mark.exists() for mark in marks]  # a file system may remember for a while that they are not there
        rendezvous.wait(cluster, task, token=joining.token(run), timeout_s=REACH_S)
        write_json(run.control / "check" / f"{task.name}.mark", {})
        lag_s = delay(marks)
        next_one = cluster.tasks[(cluster.tasks.index(task) + 1) % len(cluster.tasks)]
        return found | vars(measure(task, next_one)) | {"lag_s": lag_s}
    except (ClusterError, OSError, ValueError) as error:
        return found | {"unreached": str(error)}


def alone(node: str) -> dict[str, Any]:
    """Return the findings that need no other host: whether it sees the data."""
    return {"node": node, "data": Path(os.environ["DATA_DIR"]).is_dir(), "unreached": ""}


def delay(paths: Collection[Path]) -> float:
    """Return the seconds until this host sees files that others write now; at most `REACH_S`."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < REACH_S and not all(path.exists() for path in paths):
        time.sleep(POLL_S)
    return min(passed_s, REACH_S)


def measure(task: Task, other: Task, clock: Callable[[], float] = time.time) -> Link:
    """Measure the link to another task, while answering the task that measures the link to this one.

    Raises:
        OSError: the other does not answer.
    """
    with socket.create_server((task.host, task.port)) as listener:
        listener.settimeout(REACH_S)
        answering = threading.Thread(target=_answer, args=(listener, clock))
        answering.start()
        try:
            return _send(other, clock)
        finally:
            answering.join()


def _send(other: Task, clock: Callable[[], float]) -> Link:
    """Return the link to a task, which may still be about to listen, or listen for the rendezvous."""
    deadline = time.monotonic() + REACH_S
    while True:
        try:
            with socket.create_connection((other.host, other.port), REACH_S) as connection:
                stream = connection.makefile("rw")
                sent_at = clock()
                stream.write("time\n")
                stream.flush()
                skew_s = float(json.loads(stream.readline(64))) - (sent_at + clock()) / 2
                return Link(skew_s, _bandwidth(connection, stream))
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _bandwidth(connection: socket.socket, stream: TextIO) -> float:
    """Return the megabytes that arrive in a second."""
    began = time.monotonic()
    for _ in range(CHUNKS):
        connection.sendall(CHUNK)
    stream.readline(64)  # all has arrived
    return CHUNKS * len(CHUNK) / 1e6 / max(time.monotonic() - began, 1e-6)


def _answer(listener: socket.socket, clock: Callable[[], float]) -> None:
    """Answer one other task: the time, and once it has sent everything, that it arrived."""
    deadline = time.monotonic() + REACH_S
    while time.monotonic() < deadline:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(REACH_S)
            try:
                if connection.recv(5) != b"time\n":  # a late greeting of the rendezvous
                    continue
                connection.sendall(json.dumps(clock()).encode() + b"\n")
                left = CHUNKS * len(CHUNK)
                while left and (received := len(connection.recv(min(left, 2**20)))):
                    left -= received
                connection.sendall(b"done\n")
            except OSError:
                continue
            return


if __name__ == "__main__":
    sys.exit(main())
