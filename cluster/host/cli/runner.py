"""How invoke runs a command here: in a separate process group, so that it ends together with all that it started.

invoke's own runner passes a Ctrl-C on as a character that no program reads without a terminal, and kills only the shell
when a command takes too long: the engine's client behind it would run on and hold up its caller.
"""

import contextlib
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from invoke import Context, Result
from invoke.exceptions import UnexpectedExit
from invoke.runners import Local

from cluster.system import processes

INTERRUPTED_S = 5.0
"""How long a command may take to end once it is interrupted before anybody waits for it."""


class Runner(Local):  # type: ignore[misc]  # invoke has no types
    """Ends a command that was interrupted: the first Ctrl-C interrupts it, too, and the second kills it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.process: subprocess.Popen[bytes] | None = None
        self._interrupts = 0

    def run(self, command: str, **options: Any) -> Result:
        """Run a command; `KeyboardInterrupt` if it was interrupted, whatever it ended with."""
        try:
            result = super().run(command, **options)
        except KeyboardInterrupt:
            if self.process is not None and not self._interrupts:  # invoke passes on only what comes while it waits
                self._signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    processes.wait(self.process, INTERRUPTED_S)
                self.kill()
            raise
        except UnexpectedExit as error:
            if self._interrupts:
                raise KeyboardInterrupt from error
            raise
        if self._interrupts:
            raise KeyboardInterrupt
        return result

    def echo(self, command: str) -> None:
        """Show a command before it runs, so that it can be pasted."""
        print(command, flush=True)

    def start(self, command: str, shell: str, env: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [shell, "-c", command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )

    def send_interrupt(self, interrupt: KeyboardInterrupt) -> None:  # noqa: ARG002  # invoke's name
        self._interrupts += 1
        self._signal(signal.SIGINT if self._interrupts == 1 else signal.SIGKILL)

    def kill(self) -> None:
        """Kill the command and all that it started, because it took too long."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        processes.signal_group(self.process, number)

    @property
    def process_is_finished(self) -> bool:
        """Whether the command has ended; it is not reaped before `returncode`, so that its group can be killed."""
        assert self.process is not None
        return processes.has_ended(self.process)

    def returncode(self) -> int:
        """Reap the command and whatever it left behind in its process group; return its exit code."""
        assert self.process is not None
        if self._interrupts:
            self.kill()  # whatever ignores the interrupt
        return self.process.wait()

    def _thread_join_timeout(self, target: Callable[..., Any]) -> int | None:
        """Return how many seconds to wait for its output, which a process that left the group may keep open.

        invoke has no public setting for it.
        """
        ended = self.timed_out or self._interrupts > 0
        return 1 if ended else super()._thread_join_timeout(target)
