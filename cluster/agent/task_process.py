"""The process that a task's agent watches: a training program, which waits at a gate, or a user's script.

A script does not know about gates, heartbeats or our exit codes. So its agent starts it only once the cluster is
complete, and writes the heartbeat on its behalf until it ends.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from cluster.contract import settings
from cluster.contract.recovery import ends, snapshot_files
from cluster.contract.run import joining, logs
from cluster.contract.run.folder import RunFolder
from cluster.contract.spec import Task
from cluster.system import fork_server, memory, processes
from cluster.system.files import ROOT
from cluster.system.messages import NOISE
from cluster.system.waiting import Bell

KERAS_HOOK = ROOT / "train" / "patches" / "hook"
"""The folder of the `sitecustomize` module that patches Keras 3 in a script's process."""


class TaskProcess(ABC):
    """One attempt of the task's program: its process and the last lines of its output."""

    scripted = False
    """Whether it is a user's script. Any other program can be started long before it joins the cluster."""
    noise: tuple[bytes, ...] = ()
    """Lines with one of these parts are neither logged nor shown."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, folder: Path) -> None:
        """Prepare the program; `folder` is the working folder of a script."""
        self._command, self._environment = command, dict(environment)
        self._log, self._folder = log, folder
        self._process: subprocess.Popen[bytes] | fork_server.ForkedProcess | None = None
        self._lines: list[str] = []
        self._end_requested = False
        self._stop_timer = processes.StopTimer()

    def _start(self, folder: Path | None = None, descriptors: tuple[int, ...] = ()) -> None:
        """Start the process. Its output goes to its log and to this process's output."""
        self._process = fork_server.start(
            self._command,
            cwd=folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            process_group=0,  # `invoke up` handles a Ctrl-C in the terminal
            preexec_fn=processes.die_with_parent,
        )
        assert self._process.stdout is not None
        copied = (self._process.stdout, self._log, self._lines, self.noise)
        self._pump = threading.Thread(target=logs.copy_output, args=copied, daemon=True)
        self._pump.start()

    @abstractmethod
    def open_gate(self, variables: dict[str, str]) -> None:
        """Let the program join its cluster, with this attempt's variables, which a standby process still lacks."""

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def ended(self) -> bool:
        """Whether the program was started and has ended."""
        return self._process is not None and processes.reap(self._process) is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP keeps the program stopped."""
        return self._process is not None and not self.ended and processes.stopped_at(self.pid) is not None

    @property
    def stopped_s(self) -> float:
        """For how many seconds the program has been stopped by a signal, as far as this agent has observed."""
        return self._stop_timer.look(self.pid) if self._process and not self.ended else 0.0

    def wait(self, timeout_s: float | None = None, bell: Bell | None = None) -> int:
        """Return the exit code, negative for a signal; raise TimeoutExpired, also at `bell`, if the program runs."""
        assert self._process is not None
        return processes.wait(self._process, timeout_s, bell)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            processes.signal_group(self._process, number)

    def request_end(self) -> None:
        """Send SIGTERM once: a second one would interrupt the response to the first."""
        if not self._end_requested:
            self._end_requested = True
            self._signal(signal.SIGTERM)

    def show_stacks(self) -> None:  # noqa: B027  # a script prints none
        """Make the program print its stacks once, if it supports that."""

    def end(self, grace_s: float) -> int:
        """End the program, by SIGKILL after `grace_s`; return its exit code, 0 if it was never started."""
        if self._process is None:
            return 0
        if not self.ended and grace_s > 0:
            self.request_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        self._signal(signal.SIGKILL)
        code = self.wait()
        self._pump.join(5.0)
        return code

    def error(self, code: int) -> str | None:
        """Return the error that the program reported before it ended with this code.

        Without one, return its last line, labelled as such, or None after a signal, which is explanation enough.
        """
        self._pump.join(1.0)
        lines = [line for line in self._lines if not line.startswith("warning: ")]  # such as those of the Keras hook
        if (error := ends.find_error(lines, code)) or code < 0 or not lines:
            return error
        return f"{processes.describe_exit(code)}, last line: {lines[-1].strip()}"


class Trainer(TaskProcess):
    """A training program. It starts immediately and waits at its gate, the pipe whose descriptor is `GATE_FD`."""

    noise = NOISE

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, folder: Path) -> None:
        gate_read, gate_write = os.pipe()
        # TensorFlow leaves temporary files behind when it is killed.
        self._scratch = tempfile.TemporaryDirectory(dir=environment.get("TMPDIR"), ignore_cleanup_errors=True)
        own = {"GATE_FD": str(gate_read), "TMPDIR": self._scratch.name}
        super().__init__(command, {**environment, **own}, log, folder)
        self._gate = open(gate_write, "wb", 0)  # noqa: PTH123, SIM115  # closed by `open_gate` and `end`
        self._stacks_shown = False
        self._start(descriptors=(gate_read, *snapshot_files.descriptors(environment)))
        os.close(gate_read)

    def show_stacks(self) -> None:
        """Make the program print every thread's Python stack once, if it has installed the signal handler by now."""
        if not self._stacks_shown and not self.ended and processes.handles(self.pid, signal.SIGUSR1):
            assert self._process is not None
            self._stacks_shown = True
            self._process.send_signal(signal.SIGUSR1)

    def open_gate(self, variables: dict[str, str]) -> None:
        with contextlib.suppress(BrokenPipeError), self._gate:
            self._gate.write(json.dumps(variables).encode() + b"\n")

    def end(self, grace_s: float) -> int:
        code = super().end(grace_s)
        self._gate.close()
        self._scratch.cleanup()
        return code


class Script(TaskProcess):
    """A user's script. It has no gate, so it starts only once the cluster is complete, in a separate working folder."""

    scripted = True

    def open_gate(self, variables: dict[str, str]) -> None:
        self._environment = script_environment(self._environment) | variables
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start(self._folder)


def script_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a script's environment, in which modules of this checkout cannot shadow the script's imports.

    The only entry added to its path is the folder of the Keras hook, which has no other module.
    """
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and Path(entry).resolve() != ROOT]
    return {**settings.one_core_threads(), **environment, "PYTHONPATH": os.pathsep.join([str(KERAS_HOOK), *kept])}


def temporary_folder(run: RunFolder, task: Task) -> Path:
    """Return the task's folder for temporary files, in which scripts keep checkpoints. It survives restarts.

    Its name is derived from the run's token, so that other users of the machine cannot predict and create it.
    """
    digest = hashlib.sha256(joining.run_token(run).encode()).hexdigest()
    return Path(tempfile.gettempdir(), f"{task.name}-{digest[:12]}")


class MemoryKills:
    """The kernel's kills of this task's processes for lack of memory, from the creation of this object."""

    def __init__(self) -> None:
        self._kills_before = memory.kills()
        self._began_s = time.monotonic()

    def include(self, program: TaskProcess, code: int, standby_kills: int = 0) -> bool:
        """Return whether the program, and not only its killed standby processes, was killed for lack of memory."""
        if code != -signal.SIGKILL:
            return False
        in_container = memory.kills() > self._kills_before + standby_kills
        return in_container or memory.in_kernel_log(program.pid, self._began_s)


def describe_end(code: int, *, out_of_memory: bool) -> str:
    """Describe the reason why a program ended before its work was done."""
    if out_of_memory and memory.limit_bytes() < sys.maxsize:
        return f"killed for memory: the task may use {memory.limit_bytes() / 2**30:.1f} GiB, see --memory of up"
    if out_of_memory:
        return "killed for memory: the kernel reports that the machine had none left"
    return processes.describe_exit(code) if code else "ended with exit code 0 before it was done"
