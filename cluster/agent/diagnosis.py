"""The reasons why a program ended, or why a task does not answer."""

from __future__ import annotations

import signal
import sys
import time

from cluster.agent.program import Program
from cluster.agent.standby import Standby
from cluster.contract.run.folder import RunFolder
from cluster.contract.run.logs import last_line
from cluster.system import memory
from cluster.system.processes import describe_exit


class MemoryKills:
    """The processes of this task that the kernel kills for lack of memory from now on."""

    def __init__(self) -> None:
        self._kills_before = memory.kills()
        self._began_s = time.monotonic()

    def include(self, program: Program, code: int, standby: Standby) -> bool:
        """Return whether the program, which ended with this code, was killed for memory, and not only its standby."""
        if code != -signal.SIGKILL:
            return False
        in_container = memory.kills() > self._kills_before + standby.kills
        return in_container or memory.in_kernel_log(program.pid, self._began_s)


def describe(code: int, *, out_of_memory: bool) -> str:
    """Describe the reason why a program ended before its work was done."""
    if out_of_memory and memory.limit_bytes() < sys.maxsize:
        return f"killed for memory: the task may use {memory.limit_bytes() / 2**30:.1f} GiB, see --memory of up"
    if out_of_memory:
        return "killed for memory: the kernel reports that the machine had none left"
    return describe_exit(code) if code else "ended with exit code 0 before it was done"


def explain_missing(run: RunFolder, task: str) -> str:
    """Describe a task that does not answer from its records."""
    beat = run.heartbeats().get(task)
    if beat is None:
        return "never started"
    explanation = f"state {beat.state}"
    if beat.exit_code is not None:
        explanation += f", {describe_exit(beat.exit_code)}"
    if beat.obstacle:
        explanation += f", {beat.obstacle}"
    if last := last_line(run.log(task)):
        explanation += f", last line: {last[:200]}"
    return explanation
