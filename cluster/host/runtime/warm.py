"""The warm process, which imports TensorFlow while `up` still prepares a local run; a fork becomes the supervisor.

    python -m cluster.host.runtime.warm        standard input is its connection to `up`

Before it becomes the supervisor, the fork runs programs in which `up` calls the user's code, and which need the same
imports. They are in the machine's network; the supervisor enters the run's private network.

With `--keep-warm` the process stays for the next `up` of this checkout. It listens on a socket in the user's runtime
folder and forks a supervisor for each connection. Like every process that forks (`cluster/system/fork_server.py`), it
has only imported modules. A fork refuses a run for which a new process would behave differently: with other variables
or limits, or after a change to the imported files (`loaded.py`).
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
from typing import IO, Any

from cluster.contract import settings, user_code
from cluster.contract.run import owner
from cluster.contract.run.folder import RunFolder
from cluster.host.runtime import namespaces, supervisor
from cluster.host.runtime.loaded import Loaded, circumstances, sha256_of
from cluster.host.runtime.resources import PRIVATE
from cluster.system import fork_server, memory, processes
from cluster.system.errors import EXIT_FAILED
from cluster.system.files import ROOT, open_file

POLL_S = 0.01
KILL_S = 10.0
"""Timeout for a killed program to end."""
OF_RUN = ("RUN_DIR", "TASK", "TF_CONFIG", owner.TOKEN)
"""The variables that may differ between the runs of one warm process."""
NO_TOKEN = "0" * 32
HERE, IMPORTED = b"\0", b"\1"
ANSWER_S = 1.0
"""Timeout for a kept process to answer a connection, before a new process is started instead."""
CHECK_S = 5.0
"""Timeout for its fork to check whether it can serve the run."""
TICK_S = 1.0
SOCKET = f"{hashlib.sha256(f'{ROOT}:{sys.executable}'.encode()).hexdigest()[:16]}.sock"


class ForkedProgram:
    """A program that the process on the other side has forked, see `user_code.Program`.

    It has a separate connection, on which its exit code arrives, and whose end kills it.
    """

    def __init__(self, connection: socket.socket, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._connection, self._command = connection, command
        self._code: int | None = None
        self._program, theirs = socket.socketpair()
        read, write = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(read, "rb")
        order = json.dumps({"command": command, "environment": dict(environment)}).encode() + b"\n"
        try:
            sent = socket.send_fds(connection, [order], [write, theirs.fileno()])
            connection.sendall(order[sent:])
        finally:
            os.close(write)
            theirs.close()

    def wait(self, timeout_s: float) -> int:
        if self._code is None:
            self._program.settimeout(timeout_s)
            try:
                self._code = receive_number(self._program)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._command, timeout_s) from None
        return -signal.SIGKILL if self._code is None else self._code

    def kill(self) -> None:
        if self._code is None:
            try:
                self._program.shutdown(socket.SHUT_WR)
                self.wait(KILL_S)
            except (OSError, subprocess.TimeoutExpired):
                self._connection.close()


def receive_number(connection: socket.socket) -> int | None:
    """Return the number that the other side sends; None if it has ended. Raises TimeoutError after a timeout."""
    with contextlib.suppress(ConnectionError, struct.error):
        return int(struct.unpack("i", connection.recv(4))[0])
    return None


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next message, with received descriptors as `files`; raise SystemExit if the other side has ended."""
    text, files = b"", list[int]()
    while not text.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(connection, 2**16, 2)
        if not part:
            raise SystemExit(EXIT_FAILED)
        text, files = text + part, files + more
    return {**json.loads(text), "files": files}


def serve_calls(connection: socket.socket) -> None:
    """Run programs for `up`, one at a time, until a message without a command asks for the supervisor."""
    while "command" in (order := receive(connection)):
        written, ours = order["files"]
        with os.fdopen(written, "wb") as output:
            how = {"env": order["environment"], "stdout": output, "stderr": subprocess.STDOUT, "process_group": 0}
            process = fork_server.start(order["command"], **how, preexec_fn=processes.die_with_parent)
        with socket.socket(fileno=ours) as program, contextlib.suppress(OSError):  # `up` may have ended
            while not processes.has_ended(process) and not select.select([program], [], [], POLL_S)[0]:
                pass
            processes.signal_group(process, signal.SIGKILL)
            program.sendall(struct.pack("i", processes.wait(process)))


class EarlySupervisor:
    """The future supervisor of a run without a folder, which imports already. Until the hand-over it ends with us."""

    def __init__(
        self, run: RunFolder, how: Mapping[str, Any], config: Mapping[str, Any], strategy: str, keep_s: float = 0.0
    ) -> None:
        """Connect to a kept warm process, or start one, which is kept for `keep_s` after its last run."""
        self.token, self.pid, self._imported = secrets.token_hex(16), 0, False
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
        end()  # the kept process hangs, or its imports are outdated
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
        """Start a program as a fork with the imports, once they are done; as a new process if that fails."""
        if not self._has_imported() and not self.process:
            self._begin()
        if self._has_imported():
            with contextlib.suppress(OSError):
                return ForkedProgram(self._connection, command, environment)
        return user_code.NewProcess(command, ROOT, environment)

    def serves(self) -> bool:
        """Wait for the imports; return whether the process is ready for the run. If not, end it."""
        if not self._is_ready() and not self.process:
            self._begin()
        if self._is_ready():
            return True
        self.end()
        return False

    def end(self) -> None:
        """End the process, which imported for another configuration."""
        self._connection.close()
        if self.process:
            self.process.kill()
            self.process.wait()

    def hand_over(self) -> None:
        """Let the supervisor start the run, whose folder is now complete."""
        self._tell({})
        if self.process:
            self.process.poll()  # the original process has ended, unless it is kept

    def _tell(self, what: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which a later wait notices
            self._connection.sendall(json.dumps(what).encode() + b"\n")

    def _has_imported(self) -> bool:
        with contextlib.suppress(OSError):
            self._connection.settimeout(supervisor.START_S if self.process else CHECK_S)
            self._imported = self._imported or self._connection.recv(len(IMPORTED)) == IMPORTED
        if self.process and not self._imported:
            self.end()  # a stopped one would make every later call wait, too
        return self._imported

    def _is_ready(self) -> bool:
        """Turn the process into the supervisor, in the run's network; return whether that worked."""
        if not self.pid and self._has_imported():
            with contextlib.suppress(OSError):
                self._tell({})
                self.pid = receive_number(self._connection) or 0
        return self.pid != 0


def end() -> bool:
    """End the kept process of this checkout; return whether there was one."""
    found = False
    with contextlib.suppress(OSError), _connect() as connection:
        (pid,) = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4))
        recorded: dict[str, Any] = processes.identity(pid)
        found = processes.kill(recorded, signal.SIGKILL)
    with contextlib.suppress(OSError), _folder() as folder:
        os.unlink(SOCKET, dir_fd=folder)
    return found


def refusal() -> str:
    """Return the reason why no process can be kept here; empty if one can."""
    try:
        with _folder():
            return ""
    except OSError as error:
        can_be_made = isinstance(error, FileNotFoundError) and os.access(Path(error.filename).parent, os.W_OK)
        return "" if can_be_made else str(error)


@contextlib.contextmanager
def _folder(*, create: bool = False) -> Iterator[int]:
    """Open the folder of the sockets, which must be only this user's; yield its descriptor, to address its entries."""
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
    """Connect to the kept process of this checkout; raise OSError if there is none."""
    with _folder() as folder:
        status = os.stat(SOCKET, dir_fd=folder, follow_symlinks=False)
        if status.st_uid != os.geteuid() or status.st_mode != stat.S_IFSOCK | 0o700:
            raise PermissionError(f"{SOCKET} is not a socket that only you can use")
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_S)
        connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # the full path may be too long for a socket
        return connection


def own_code() -> list[Path]:
    """Return the files and folders on which the imports depend, except installed packages."""
    keras = os.environ.get("KERAS_HOME") or (settings.home() or ROOT) / ".keras"
    return [ROOT / "cluster", ROOT / "train", ROOT / "requirements", Path(keras, "keras.json")]


class Warm:
    """The kept process: imports for an order, and forks a process for each connection."""

    def __init__(self, order: Mapping[str, Any], began: float) -> None:
        initial = dict(os.environ)
        _preload(order)
        imported = dict(os.environ)
        os.environ.clear()
        os.environ.update(initial)
        self._chosen = _preload(order)  # again, to distinguish variables that only the first imports set
        self._added = {name: imported[name] for name in imported if imported[name] != os.environ.get(name)}
        ctypes.CDLL(None).malloc_trim(0)
        self.loaded = Loaded(own_code(), order["code"], began)
        self._keep_s = mmap.mmap(-1, 8)  # how long to stay after the last run; shared with the forks
        self._keep_s[:] = struct.pack("d", order["keep_s"])

    def serve(self, first: socket.socket) -> socket.socket:
        """Fork for each connection and return it in the fork; this process never returns, and exits when it is over."""
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
                os._exit(0)  # the forks continue
            ready, _, _ = select.select([listener], [], [], TICK_S)
            new = [listener.accept()[0]] if ready else []

    def check(self, order: Mapping[str, Any]) -> None:
        """In a fork, raise SystemExit if a new process would import other files or have other limits."""
        if order["circumstances"] != circumstances() or not self.loaded.is_current():
            raise SystemExit(EXIT_FAILED)
        if order["keep_s"]:
            self._keep_s[:] = struct.pack("d", order["keep_s"])

    def complete(self, chosen: Mapping[str, str]) -> None:
        """In a fork, raise SystemExit if the imports had other variables than `chosen`; set those the imports set."""
        if chosen != self._chosen:
            raise SystemExit(EXIT_FAILED)
        os.environ.update(self._added)


def _listen(listener: socket.socket) -> int:
    """Listen on this checkout's socket, replacing the previous process; return the socket's inode."""
    with _folder(create=True) as folder:
        scratch, umask = f"{SOCKET}.{os.getpid()}", os.umask(0o077)
        listener.bind(f"/proc/self/fd/{folder}/{scratch}")
        os.umask(umask)
        listener.listen()
        os.rename(scratch, SOCKET, src_dir_fd=folder, dst_dir_fd=folder)
    return _inode()


def _inode() -> int:
    with contextlib.suppress(OSError), _folder() as folder:
        return os.stat(SOCKET, dir_fd=folder, follow_symlinks=False).st_ino
    return 0


def _preload(order: Mapping[str, Any]) -> dict[str, str]:
    """Import the tasks' modules; return the resulting environment, which the imports change, without `OF_RUN`."""
    importlib.import_module(supervisor.AGENT)
    with contextlib.suppress(Exception):  # the supervisor tries again and logs the error
        fork_server.preload(order["preload"], order["config"], order["strategy"])
    return {name: value for name, value in os.environ.items() if name not in OF_RUN}


def main() -> None:
    """Import for the order on the connection, and become the run's supervisor once the run folder is complete."""
    began, first, warm = time.time(), socket.socket(fileno=os.dup(0)), None
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    connection, order = first, receive(first)
    if order["keep_s"]:
        warm = Warm(order, began)
        connection = warm.serve(first)
        if connection is not first:
            connection.sendall(HERE)
            order = receive(connection)
            warm.check(order)
        processes.replace_variable(owner.TOKEN, order["environment"][owner.TOKEN])
        os.environ.clear()
        os.environ.update(order["environment"])
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
