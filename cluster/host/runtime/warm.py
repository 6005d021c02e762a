"""The process that imports before a local run's folder exists. A fork of it will be the run's supervisor.

    python -m cluster.host.runtime.warm        standard input is its connection to `up`

Until then the fork starts the programs by which `up` calls the user's code, which would import the same. They have the
machine's network; the supervisor enters the run's own one.

With `--keep-warm` the process stays, for the next `up` of this checkout. It listens on a socket in the user's runtime
folder and forks a supervisor for each connection. It has imported and done nothing else, like every process that forks
(`cluster/system/fork_server.py`). A fork refuses a run that it would not serve as a new process would: with other
variables or limits, or after a change to what was imported (`cluster/system/loaded.py`).
"""

import contextlib
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import secrets
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.contract import settings, user_code
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import namespaces, supervisor
from cluster.host.runtime.forked_programs import ForkedProgram, receive, receive_number, serve_calls
from cluster.host.runtime.resources import PRIVATE
from cluster.system import fork_server, memory, processes
from cluster.system.errors import EXIT_FAILED
from cluster.system.files import open_file
from cluster.system.loaded import Loaded, circumstances, sha256_of
from cluster.system.paths import ROOT

OF_RUN = ("RUN_DIR", "TASK", "TF_CONFIG", owner.TOKEN)
"""The variables that differ between runs which one process serves."""
NO_TOKEN = "0" * 32
HERE, IMPORTED = b"\0", b"\1"
ANSWER_S = 1.0
"""How long a process that stays may take to say that it is there, before another one imports instead."""
CHECK_S = 5.0
"""How long its fork may take to check whether it serves the run."""
TICK_S = 1.0
SOCKET = f"{hashlib.sha256(f'{ROOT}:{sys.executable}'.encode()).hexdigest()[:16]}.sock"


class EarlySupervisor:
    """The supervisor of a run whose folder does not exist yet: it imports until `start_supervisor` hands the run over.

    Until then it ends with this process.
    """

    def __init__(
        self, run: RunFolder, how: Mapping[str, Any], config: Mapping[str, Any], strategy: str, keep_s: float = 0.0
    ) -> None:
        """Take a process that has imported, or let one import, which stays for `keep_s` after its last run."""
        self._run, self.token, self.pid, self._imported = run, secrets.token_hex(16), 0, False
        environment = supervisor.variables(how) | {"RUN_DIR": str(run.path), owner.TOKEN: self.token}
        self._order: dict[str, Any] = {"preload": how["preload"], "network": how["network"], "keep_s": keep_s}
        self._order |= {"run": str(run.path), "config": config, "strategy": strategy, "environment": environment}
        self._order["circumstances"] = circumstances()
        self.process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._connection = _connect()
            self._tell(self._order)
            if self._connection.recv(len(HERE)):
                return
        self._begin()

    def _begin(self) -> None:
        """Let a new process import."""
        end()  # it hangs, or what it imported is of no more use
        self._imported = False
        self._connection, theirs = socket.socketpair()
        environment = self._order["environment"]
        if self._order["keep_s"]:
            environment = {name: environment[name] for name in environment if name not in OF_RUN}
            environment[owner.TOKEN] = NO_TOKEN
            self._order["code"] = sha256_of(own_code())
        command = [sys.executable, "-m", "cluster.host.runtime.warm"]
        self.process = processes.start_detached(command, environment=environment, stdin=theirs.fileno())
        theirs.close()
        self._tell(self._order)

    def call(self, command: Sequence[str], environment: Mapping[str, str]) -> user_code.Program:
        """Start a program, once the imports are done, as a fork that has them; as a new process if that fails."""
        if not self._has_imported() and not self.process:
            self._begin()
        if self._has_imported():
            with contextlib.suppress(OSError):
                return ForkedProgram(self._connection, command, environment)
        return user_code.NewProcess(command, ROOT, environment)

    def serves(self, run: RunFolder) -> bool:
        """Wait for its imports; return whether it waits for this run. Otherwise it is ended."""
        if self._run == run and not self._is_ready() and not self.process:
            self._begin()
        if self._run == run and self._is_ready():
            return True
        self.end()
        return False

    def end(self) -> None:
        """End it, because it imported for another configuration or run."""
        self._connection.close()
        if self.process:
            self.process.kill()
            self.process.wait()

    def hand_over(self) -> None:
        """Let it begin with the run, whose folder is complete."""
        self._tell({})
        if self.process:
            self.process.poll()  # it has ended, unless it stays

    def _tell(self, what: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the wait for it notices
            self._connection.sendall(json.dumps(what).encode() + b"\n")

    def _has_imported(self) -> bool:
        with contextlib.suppress(OSError):
            self._connection.settimeout(supervisor.START_S if self.process else CHECK_S)
            self._imported = self._imported or self._connection.recv(len(IMPORTED)) == IMPORTED
        return self._imported

    def _is_ready(self) -> bool:
        """Let it be the supervisor, in the run's network; return whether it is."""
        if not self.pid and self._has_imported():
            with contextlib.suppress(OSError):
                self._tell({})
                self.pid = receive_number(self._connection) or 0
        return self.pid != 0


def end() -> bool:
    """End the process that stays for this checkout; return whether there was one."""
    found = False
    with contextlib.suppress(OSError), _connect() as connection:
        (pid,) = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4))
        recorded: dict[str, Any] = processes.identity(pid)
        found = processes.kill(recorded, signal.SIGKILL)
    with contextlib.suppress(OSError), _folder() as folder:
        os.unlink(SOCKET, dir_fd=folder)
    return found


def refusal() -> str:
    """Return why no process can stay here, in words; empty if one can."""
    try:
        with _folder():
            return ""
    except OSError as error:
        can_be_made = isinstance(error, FileNotFoundError) and os.access(Path(error.filename).parent, os.W_OK)
        return "" if can_be_made else str(error)


@contextlib.contextmanager
def _folder(*, create: bool = False) -> Iterator[int]:
    """Open the folder of the sockets, which is nobody else's; its entries are reached by the descriptor.

    Raises:
        OSError: there is none, or it is another user's, a link, or open to others.
    """
    named = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(named, "tf-cluster") if named else Path(tempfile.gettempdir(), f"tf-cluster-{os.geteuid()}")
    if create:
        path.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not a folder that only you can use")
        yield folder
    finally:
        os.close(folder)


def _connect() -> socket.socket:
    """Connect to the process that stays; raise OSError where there is none."""
    with _folder() as folder:
        status = os.stat(SOCKET, dir_fd=folder, follow_symlinks=False)
        if status.st_uid != os.geteuid() or status.st_mode != stat.S_IFSOCK | 0o700:
            raise PermissionError(f"{SOCKET} is not a socket that only you can use")
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S)
        connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # its path may be longer than one of a socket
        return connection


def own_code() -> list[Path]:
    """Return the files and folders that are ours, or the user's, of all that the imports depend on."""
    keras = os.environ.get("KERAS_HOME") or (settings.home() or ROOT) / ".keras"
    return [ROOT / "cluster", ROOT / "train", ROOT / "requirements", Path(keras, "keras.json")]


class Warm:
    """What stays: it has imported what an order says, and forks a process for each connection."""

    def __init__(self, order: Mapping[str, Any], began: float) -> None:
        initial = dict(os.environ)
        _preload(order)
        imported = dict(os.environ)
        _set_variables(initial)
        self._chosen = _preload(order)  # again, to know what the imports set besides
        self._added = {name: imported[name] for name in imported if imported[name] != os.environ.get(name)}
        ctypes.CDLL(None).malloc_trim(0)
        self.loaded = Loaded(own_code(), order["code"], began)
        self._keep_s = mmap.mmap(-1, 8)  # shared with the forks
        self.keep(order["keep_s"])

    def keep(self, seconds: float) -> None:
        """Stay so long after the last run."""
        self._keep_s[:] = struct.pack("d", seconds)

    def serve(self, first: socket.socket) -> socket.socket:
        """Return in a fork for each connection, with that; in this process, exit once its time is over."""
        listener, new, forks = socket.socket(socket.AF_UNIX), [first], []
        if stays := self.loaded.certain and fork_server.has_preloaded():
            inode = _listen(listener)
        last = 0.0
        while True:
            for connection in new:
                if not (fork := os.fork()):
                    listener.close()
                    os.setsid()
                    return connection
                connection.close()
                forks.append(fork)
            forks = [fork for fork in forks if not os.waitpid(fork, os.WNOHANG)[0]]
            now = time.monotonic()
            last = now if forks else last
            is_over = now - last > struct.unpack("d", self._keep_s)[0]
            if not stays or is_over or memory.is_short() or _inode() != inode:
                os._exit(0)  # what was forked continues
            ready, _, _ = select.select([listener], [], [], TICK_S)
            new = [listener.accept()[0]] if ready else []

    def check(self, order: Mapping[str, Any]) -> None:
        """In a fork: raise SystemExit if a new process would import something else, or have other limits."""
        if order["circumstances"] != circumstances() or not self.loaded.is_current():
            raise SystemExit(EXIT_FAILED)
        if order["keep_s"]:
            self.keep(order["keep_s"])

    def complete(self, chosen: Mapping[str, str]) -> None:
        """In a fork with an order's variables: raise SystemExit if the imports had others; add what they set."""
        if chosen != self._chosen:
            raise SystemExit(EXIT_FAILED)
        os.environ.update(self._added)


def _listen(listener: socket.socket) -> int:
    """Listen in the place of what stayed until now; return the socket's inode."""
    with _folder(create=True) as folder:
        scratch, umask = f"{SOCKET}.{os.getpid()}", os.umask(0o077)
        listener.bind(f"/proc/self/fd/{folder}/{scratch}")
        os.umask(umask)
        listener.listen()
        os.rename(scratch, SOCKET, src_dir_fd=folder, dst_dir_fd=folder)
    return _inode()


def _inode() -> int:
    """Return the inode of this checkout's socket; 0 if there is none."""
    with contextlib.suppress(OSError), _folder() as folder:
        return os.stat(SOCKET, dir_fd=folder, follow_symlinks=False).st_ino
    return 0


def _preload(order: Mapping[str, Any]) -> dict[str, str]:
    """Import what the tasks need; return the variables, without those of the run.

    Which they are depends on the configuration, and whether these imports are the first.
    """
    importlib.import_module(supervisor.AGENT)
    with contextlib.suppress(Exception):  # the next attempt is logged
        fork_server.preload(order["preload"], order["config"], order["strategy"])
    return {name: value for name, value in os.environ.items() if name not in OF_RUN}


def _set_variables(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def main() -> None:
    """Import what the connection orders, and be the run's supervisor once it says that its folder is complete."""
    began, first, warm = time.time(), socket.socket(fileno=os.dup(0)), None
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    connection, order = first, receive(first)
    if order["keep_s"]:
        warm = Warm(order, began)
        connection = warm.serve(first)
        if connection is not first:
            connection.sendall(HERE)
            order = receive(connection)
            warm.check(order)
        processes.replace_variable(owner.TOKEN, order["environment"][owner.TOKEN])
        _set_variables(order["environment"])
        warm.complete(_preload(order))
    else:
        processes.die_with_parent()
        _preload(order)
        if os.fork():  # an import may start a thread, and a process with threads cannot enter a network
            os._exit(0)
        os.setsid()
    connection.sendall(IMPORTED)
    serve_calls(connection)
    if order["network"] == PRIVATE:
        namespaces.enter()
    connection.sendall(struct.pack("i", os.getpid()))
    receive(connection)
    connection.close()
    run = RunFolder(Path(order["run"]))
    with open_file(run.log("supervisor"), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if warm and not warm.loaded.is_current():
        os.execve(sys.executable, supervisor.command(run), order["environment"])  # noqa: S606
    supervisor.main(run, in_network=True)


if __name__ == "__main__":
    main()
